"""What goes wrong is told as it is, in the service's words, and nothing that was written is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import expect

from engine.errors import StoreFull
from serialization.blobs import BlobClass, BlobId, Bytes
from sessions.lease import acquire
from sessions.policy import Policy
from sessions.service.backend import Backend, BackendConfig
from sessions.service.config import ServiceConfig
from sessions.stores.disk import DiskStore
from tests.faults import FaultyStore
from tests.sessions.conftest import MakeEngine
from tests.sessions.service.conftest import MakeBackend
from tests.sessions.service.page.conftest import OpenTab
from tests.sessions.service.page.tab import Tab
from tests.sessions.service.serving import Served, served
from tests.sessions.service.test_serve import serving

SAY = {"messages": [{"role": "user", "content": "elsewhere"}], "max_tokens": 4}


def elsewhere(at: Served, session: str) -> None:
    """The conversation moves on by another hand."""
    assert at.client.post(f"/v1/sessions/{session}/messages", json=SAY).status_code == 200


def returns_to(tab: Tab) -> None:
    """The person comes back to the tab."""
    tab.page.evaluate("dispatchEvent(new Event('focus'))")


def test_a_tab_left_open_offers_to_show_what_was_said_since(tab: Tab, at: Served) -> None:
    tab.go().say("one")
    elsewhere(at, tab.session)
    tab.words.fill("two")
    tab.words.press("Enter")
    expect(tab.notice).to_contain_text("moved on elsewhere")
    expect(tab.words).to_have_value("two")
    expect(tab.asked).to_have_text(["one"])
    tab.button("Show it as it is now").click()
    expect(tab.asked).to_have_text(["one", "elsewhere"])
    expect(tab.notice).to_have_count(0)
    expect(tab.words).to_have_value("two")
    tab.say("two")
    stored = at.client.get(f"/v1/sessions/{tab.session}").json()["messages"]
    assert [message["content"] for message in stored][::2] == ["one", "elsewhere", "two"]


@pytest.mark.parametrize(
    "verb", ["Say this reply anew", "Take this turn back", "A new conversation that goes on"]
)
def test_no_verb_changes_a_turn_that_is_not_shown(tab: Tab, at: Served, verb: str) -> None:
    tab.go().say("one")
    elsewhere(at, tab.session)
    tab.act(verb, 0)
    expect(tab.notice).to_contain_text("moved on elsewhere")
    stored = at.client.get(f"/v1/sessions/{tab.session}").json()["messages"]
    assert [message["content"] for message in stored][::2] == ["one", "elsewhere"]
    assert len(at.client.get("/v1/sessions").json()["data"]) == 1


def test_who_comes_back_to_a_tab_is_told_before_they_write(tab: Tab, at: Served) -> None:
    tab.go().say("one")
    with tab.answered(tab.session):
        returns_to(tab)
    expect(tab.notice).to_have_count(0)
    elsewhere(at, tab.session)
    returns_to(tab)
    expect(tab.notice).to_contain_text("moved on elsewhere")


def test_a_session_that_is_held_says_by_whom_and_until_when(tab: Tab, tmp_path: Path) -> None:
    tab.go().say("one")
    with (
        closing(DiskStore(tmp_path / "store", "default")) as store,
        acquire(store, tab.session, "somebody else"),
    ):
        tab.words.fill("two")
        tab.words.press("Enter")
        expect(tab.notice).to_contain_text("423 lease_held")
        expect(tab.notice).to_contain_text("Held by somebody else until")
        expect(tab.words).to_have_value("two")
    tab.words.press("Enter")
    expect(tab.asked).to_have_text(["one", "two"])


def test_what_is_too_much_says_when_to_try_again(open_tab: OpenTab, make_backend: MakeBackend) -> None:
    with served(make_backend(), ServiceConfig(tokens_per_minute=20)) as at:
        tab = open_tab(at).go().say("a message of some length")
        tab.words.fill("two")
        tab.words.press("Enter")
        expect(tab.notice).to_contain_text("429 busy")
        expect(tab.notice).to_contain_text("Try again in")
        expect(tab.words).to_have_value("two")


def test_a_service_that_is_being_ended_says_so(tab: Tab, make_backend: MakeBackend) -> None:
    backend = make_backend()
    with served(backend) as at:
        tab.url = at.url
        tab.go().say("one")
        backend.drain(0)
        tab.act("Say this reply anew", 0)
        expect(tab.notice).to_contain_text("503 draining")
        expect(tab.button("Try again")).to_be_visible()
        expect(tab.replies).to_have_count(1)


def test_a_conflict_says_what_it_is(tab: Tab, at: Served) -> None:
    at.client.post("/v1/sessions", json={"name": "taken"})
    tab.go().say("one")
    tab.button("Rename").click()
    tab.page.locator("#name").fill("taken")
    tab.page.locator("#name").press("Enter")
    expect(tab.notice).to_contain_text("409 session_exists")


class Filling(FaultyStore):
    """A store that may be full."""

    full = False

    def put(self, cls: BlobClass, data: Bytes) -> BlobId:
        if self.full:
            raise StoreFull("there is no room on the disk")
        return super().put(cls, data)


@pytest.fixture
def store(tmp_path: Path) -> Filling:
    return Filling(DiskStore(tmp_path / "filling", "default"))


@pytest.fixture
def filling(make_engine: MakeEngine, store: Filling) -> Iterator[Served]:
    backend = Backend(make_engine(), lambda _: store, BackendConfig(policy=Policy(lease=5, grace=10)))
    with served(backend) as running:
        yield running
    store.full = False
    backend.close()


def test_a_turn_that_could_not_be_saved_says_so_until_it_is(
    open_tab: OpenTab, filling: Served, store: Filling
) -> None:
    tab = open_tab(filling).go().say("one")
    store.full = True
    tab.words.fill("two")
    tab.words.press("Enter")
    expect(tab.notice).to_contain_text("in the service’s memory alone: there is no room on the disk")
    expect(tab.asked).to_have_text(["one", "two"])
    assert len(filling.client.get(f"/v1/sessions/{tab.session}").json()["messages"]) == 2
    tab.button("Save it now").click()
    expect(tab.notice.first).to_contain_text("507 store_full")
    store.full = False
    tab.button("Save it now").click()
    expect(tab.notice).to_have_count(0)
    expect(tab.asked).to_have_text(["one", "two"])
    assert len(filling.client.get(f"/v1/sessions/{tab.session}").json()["messages"]) == 4


def test_a_stream_that_breaks_off_says_so_and_nothing_is_taken_for_whole(
    open_tab: OpenTab, tiny_path: Path, tmp_path: Path
) -> None:
    with serving(tiny_path, tmp_path / "store") as process:
        at = Served(process.url, httpx.Client(), None)  # type: ignore[arg-type]
        tab = open_tab(at).go().say("one")
        tab.page.evaluate("sessionStorage.setItem('tenuto.settings', JSON.stringify({ max_tokens: 6000 }))")
        tab.words.fill("on and on")
        tab.words.press("Enter")
        expect(tab.page.locator(".growing .words")).not_to_have_text("")
        process.popen.kill()
        process.ended()
        expect(tab.notice).to_contain_text("broke off")
        expect(tab.asked).to_have_text(["one"])
        expect(tab.words).to_have_value("on and on")
        tab.words.press("Enter")
        expect(tab.notice).to_contain_text("does not answer")
        expect(tab.words).to_have_value("on and on")


def test_a_list_that_cannot_be_read_is_read_again(tab: Tab) -> None:
    tab.page.route("**/v1/sessions?*", lambda route: route.abort())
    tab.go()
    expect(tab.page.locator("#lines .notice")).to_contain_text("does not answer")
    tab.page.unroute("**/v1/sessions?*")
    tab.button("Try again").click()
    expect(tab.page.locator("#lines")).to_contain_text("no conversation yet")
