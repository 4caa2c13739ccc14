"""Where the service has keys the page asks for one, and keeps it for the tab alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from sessions.keys import ApiKeys
from tests.sessions.service.conftest import MakeBackend
from tests.sessions.service.page.conftest import OpenTab
from tests.sessions.service.page.tab import PATIENT, Tab
from tests.sessions.service.serving import Served, served


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    made = ApiKeys(tmp_path / "keys")
    return {tenant: made.create(tenant)[1] for tenant in ("ann", "bob")}


@pytest.fixture
def at(make_backend: MakeBackend, keys: dict[str, str], tmp_path: Path) -> Iterator[Served]:
    with served(make_backend(), keys=ApiKeys(tmp_path / "keys")) as running:
        yield running


def give(tab: Tab, key: str) -> None:
    tab.page.locator("#key-field").fill(key)
    tab.page.locator("#key-field").press("Enter")


def test_a_key_is_asked_for_once_and_kept_for_the_tab_alone(
    tab: Tab, open_tab: OpenTab, keys: dict[str, str]
) -> None:
    tab.go()
    give(tab, keys["ann"])
    tab.say("one")
    stored = tab.page.evaluate(
        "[Object.values(sessionStorage), Object.values(localStorage), document.cookie]"
    )
    assert keys["ann"] in stored[0]
    assert stored[1:] == [[], ""]
    assert keys["ann"] not in tab.page.url
    tab.page.reload()
    expect(tab.replies).to_have_count(1)
    expect(tab.page.locator("dialog")).to_have_count(0)
    other = open_tab().go()
    expect(other.page.locator("#key-field")).to_be_visible()


def test_a_wrong_key_is_asked_for_again(tab: Tab, keys: dict[str, str]) -> None:
    tab.go()
    give(tab, "tnt_nobodys")
    expect(tab.page.get_by_text("That key is nobody’s here.")).to_be_visible()
    give(tab, keys["ann"])
    expect(tab.page.locator("dialog")).to_have_count(0)
    expect(tab.page.locator("#lines")).to_contain_text("no conversation yet")


def test_without_one_nothing_is_shown_and_it_says_why(tab: Tab) -> None:
    tab.go()
    expect(tab.page.locator("dialog")).to_be_visible()
    tab.page.keyboard.press("Escape")
    expect(tab.page.locator("#lines .notice")).to_contain_text("401 invalid_api_key")
    tab.button("Try again").click()
    expect(tab.page.locator("dialog")).to_be_visible()


def test_another_key_shows_anothers_conversations(tab: Tab, keys: dict[str, str]) -> None:
    tab.go()
    give(tab, keys["ann"])
    tab.say("mine")
    tab.page.locator("#key").click()
    give(tab, keys["bob"])
    expect(tab.page.locator("#lines")).to_contain_text("no conversation yet")
    expect(tab.page.get_by_text("404 session_not_found")).to_be_visible()


def test_storage_says_whose_it_is(tab: Tab, keys: dict[str, str]) -> None:
    tab.go("#/storage")
    give(tab, keys["bob"])
    expect(tab.page.locator(".total")).to_contain_text("of tenant bob")


def test_an_archive_is_downloaded_with_the_key(tab: Tab, keys: dict[str, str], tmp_path: Path) -> None:
    tab.go()
    give(tab, keys["ann"])
    tab.say("mine")
    with tab.page.expect_download(timeout=PATIENT) as downloading:
        tab.button("Download").click()
    downloading.value.save_as(tmp_path / "mine.tenuto")
    assert (tmp_path / "mine.tenuto").stat().st_size > 0
