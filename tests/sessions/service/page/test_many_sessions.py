"""However many conversations there are, the list reads them by the page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from sessions.service.backend import Backend
from tests.sessions.service.conftest import MakeBackend
from tests.sessions.service.page.conftest import OpenTab
from tests.sessions.service.page.tab import Tab
from tests.sessions.service.serving import Served, served


@pytest.fixture
def backend(make_backend: MakeBackend) -> Backend:
    made = make_backend()
    for number in range(120):
        made.create("default", title=f"number {number:03d}")
    return made


@pytest.fixture
def at(backend: Backend) -> Iterator[Served]:
    with served(backend) as running:
        yield running


def titles(tab: Tab) -> list[str]:
    return tab.lines.locator(".called").all_text_contents()


def test_older_ones_are_read_when_they_are_asked_for(tab: Tab) -> None:
    tab.go()
    expect(tab.lines).to_have_count(50)
    tab.button("Show older").click()
    expect(tab.lines).to_have_count(100)
    tab.button("Show older").press("Enter")
    expect(tab.lines).to_have_count(120)
    expect(tab.lines.nth(100)).to_be_focused()
    expect(tab.button("Show older")).to_have_count(0)
    assert titles(tab) == [f"number {number:03d}" for number in reversed(range(120))]


def test_who_comes_back_sees_what_others_did_meanwhile(tab: Tab, backend: Backend) -> None:
    tab.go()
    tab.button("Show older").click()
    expect(tab.lines).to_have_count(100)
    backend.delete("default", backend.list("default").sessions[0].id)
    backend.create("default", title="by another hand")
    tab.page.evaluate("dispatchEvent(new Event('focus'))")
    expect(tab.lines.first).to_contain_text("by another hand")
    expect(tab.lines).to_have_count(100)
    assert titles(tab)[1] == "number 118"
    tab.button("Show older").click()
    expect(tab.lines).to_have_count(120)


def test_one_that_is_gone_leaves_the_list_when_it_is_opened(tab: Tab, backend: Backend) -> None:
    tab.go()
    expect(tab.lines).to_have_count(50)
    backend.delete("default", backend.list("default").sessions[2].id)
    tab.lines.nth(2).click()
    expect(tab.notice).to_contain_text("404 session_not_found")
    expect(tab.lines).to_have_count(49)


def test_what_is_looked_for_is_found_wherever_it_is(tab: Tab) -> None:
    tab.go()
    tab.page.locator("#containing").fill("NUMBER 00")
    expect(tab.lines).to_have_count(10)
    tab.page.locator("#containing").fill("nothing has this")
    expect(tab.page.locator("#lines")).to_contain_text("None has that in its name or title.")
    tab.page.locator("#containing").fill("")
    expect(tab.lines).to_have_count(50)


def test_one_that_was_opened_by_its_address_takes_no_place_in_a_list_that_was_not_read_so_far(
    tab: Tab, backend: Backend
) -> None:
    oldest = backend.list("default", 100, backend.list("default", 100).after).sessions[-1]
    tab.go(f"#/s/{oldest.id}")
    expect(tab.page.locator("h1")).to_have_text("number 000")
    expect(tab.lines).to_have_count(50)
    assert titles(tab)[0] == "number 119"


def test_a_fork_hangs_on_its_origin_once_that_is_read(
    open_tab: OpenTab, backend: Backend, at: Served
) -> None:
    origin = backend.list("default", 100, backend.list("default", 100).after).sessions[-1]
    forked = backend.fork("default", origin.id)
    again = backend.fork("default", forked.id)
    tab = open_tab(at).go()
    tab.button("Forks").click()
    expect(tab.page.locator(f"#lines > ul > li > ul a[data-id='{again.id}']")).to_have_count(1)
    while tab.button("Show older").count():
        tab.button("Show older").click()
        expect(tab.page.get_by_text("Reading…")).to_have_count(0)
    branch = tab.page.locator(f"#lines > ul > li:has(> a[data-id='{origin.id}']) > ul > li")
    expect(branch.locator(f"> a[data-id='{forked.id}']")).to_have_count(1)
    expect(branch.locator(f"> ul > li > a[data-id='{again.id}']")).to_have_count(1)
