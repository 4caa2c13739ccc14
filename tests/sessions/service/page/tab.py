"""A tab of a real browser at the page, by what a person does in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from playwright.sync_api import Locator, Page, Response, expect

#: Milliseconds: a loaded machine may take its time.
PATIENT = 60_000
expect.set_options(timeout=PATIENT)


@dataclass
class Tab:
    """`complaints` are what the browser's console says that is none of a refusal."""

    page: Page
    url: str
    complaints: list[str] = field(default_factory=list)

    def go(self, hash: str = "") -> Tab:
        self.page.goto(f"{self.url}/{hash}")
        return self

    # --- what is seen ---------------------------------------------------------------------------

    @property
    def replies(self) -> Locator:
        return self.page.locator(".message.assistant .words")

    @property
    def asked(self) -> Locator:
        return self.page.locator(".message.user .words")

    @property
    def bars(self) -> Locator:
        return self.page.locator("details.told")

    @property
    def lines(self) -> Locator:
        return self.page.locator("#lines a.line")

    @property
    def words(self) -> Locator:
        return self.page.locator("#words")

    @property
    def notice(self) -> Locator:
        return self.page.locator(".notice")

    @property
    def session(self) -> str:
        """The id of the conversation that is shown."""
        found = re.search(r"#/s/([0-9A-Z]{26})$", self.page.url)
        assert found is not None, self.page.url
        return found[1]

    def counts(self, turn: int) -> dict[str, int]:
        """The legend of a turn's bar."""
        texts = self.bars.nth(turn).locator(".count").all_inner_texts()
        return {name: int(number.replace(",", "")) for number, name in (text.split() for text in texts)}

    def hear(self, kind: str, text: str) -> None:
        """What the console says; of every refusal, whoever refuses, the browser says that it failed."""
        if kind in ("error", "warning") and not text.startswith("Failed to load resource"):
            self.complaints.append(text)

    # --- what is done ---------------------------------------------------------------------------

    def say(self, text: str) -> Tab:
        """Say it, and wait until the reply has ended as it should."""
        self.words.fill(text)
        self.words.press("Enter")
        expect(self.asked.last).to_have_text(text)
        self.rest()
        expect(self.page.locator("#main .notice.alert")).to_have_count(0)
        return self

    def rest(self) -> Tab:
        """Wait until nothing is being said."""
        expect(self.page.locator(".growing")).to_have_count(0)
        expect(self.page.locator("#send")).to_be_visible()
        return self

    def act(self, verb: str, turn: int) -> Tab:
        """Click one of a turn's buttons; turns count from 0."""
        self.page.locator(".turn").nth(turn).get_by_role("button", name=verb).click()
        return self

    def button(self, name: str) -> Locator:
        return self.page.get_by_role("button", name=name, exact=True)

    @contextmanager
    def answered(self, path: str) -> Iterator[None]:
        """What is done within makes the page ask for `path`, and waits for the answer."""

        def is_it(answer: Response) -> bool:
            return answer.url.split("?")[0].endswith(path)

        with self.page.expect_response(is_it, timeout=PATIENT):
            yield
