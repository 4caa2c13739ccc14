"""A real headless Chromium, and tabs of it at a real service. Where there is none these tests are skipped,
and say why."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Request, sync_playwright

from tests.sessions.service.page.tab import PATIENT, Tab
from tests.sessions.service.serving import Served
from tools.chromium import NoChromium, find

OpenTab = Callable[..., Tab]

DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}
NARROW = {"width": 360, "height": 640}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Of one module: as long as its driver runs, no other test of this process can have an event loop."""
    try:
        found = find()
    except NoChromium as error:
        pytest.skip(f"there is no Chromium to look at the page with: {error}")
    environ = {**os.environ, **found.environ}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=found.path, env=environ, args=["--font-render-hinting=none"]
        )
        yield browser
        browser.close()


@pytest.fixture
def open_tab(browser: Browser, request: pytest.FixtureRequest) -> Iterator[OpenTab]:
    """Tabs, each of a browser of its own, at the service `at` unless another one is given; replies have 8
    tokens unless `longest` says otherwise. At the end no script may have failed, and nothing may have been
    asked of anyone else."""
    contexts: list[BrowserContext] = []
    tabs: list[Tab] = []
    foreign: list[str] = []

    def open_tab(at: Served | None = None, longest: int = 8, **options: Any) -> Tab:
        # Long replies are greedy: what is drawn may end before its test has seen what it looks for.
        temperature = {} if longest < 100 else {"temperature": 0}
        url = (at or request.getfixturevalue("at")).url
        context = browser.new_context(**{"viewport": DESKTOP, "accept_downloads": True, **options})
        context.set_default_timeout(PATIENT)
        settings = json.dumps(json.dumps({"max_tokens": longest, **temperature}))
        place = "'tenuto.settings'"
        context.add_init_script(
            f"sessionStorage.getItem({place}) ?? sessionStorage.setItem({place}, {settings})"
        )

        def asked(asked: Request) -> None:
            if not asked.url.startswith((tab.url, "blob:")):
                foreign.append(asked.url)

        context.on("request", asked)
        contexts.append(context)
        tab = Tab(context.new_page(), url)
        tabs.append(tab)
        tab.page.on("pageerror", lambda error: tab.complaints.append(str(error)))
        tab.page.on("console", lambda said: tab.hear(said.type, said.text))
        return tab

    yield open_tab
    for context in contexts:
        context.close()
    assert [text for tab in tabs for text in tab.complaints] == []
    assert foreign == []


@pytest.fixture
def tab(open_tab: OpenTab) -> Tab:
    return open_tab()
