"""Conversations leave the page as archives, and come back."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.sessions.service.page.conftest import PHONE, OpenTab
from tests.sessions.service.page.tab import PATIENT, Tab
from tests.sessions.service.serving import Served


@pytest.fixture
def archive(tab: Tab, tmp_path: Path) -> Path:
    """The conversation that is shown, as it was downloaded."""
    tab.go().say("one").say("two")
    with tab.page.expect_download(timeout=PATIENT) as downloading:
        tab.button("Download").click()
    assert downloading.value.suggested_filename == f"{tab.session}.tenuto"
    path = tmp_path / "talk.tenuto"
    downloading.value.save_as(path)
    return path


def test_what_was_downloaded_is_the_services_own_archive(tab: Tab, at: Served, archive: Path) -> None:
    assert archive.read_bytes() == at.client.get(f"/v1/sessions/{tab.session}/export").content


def test_a_round_trip_loses_nothing(tab: Tab, at: Served, archive: Path) -> None:
    session, said = tab.session, tab.replies.all_inner_texts()
    assert at.client.delete(f"/v1/sessions/{session}").status_code == 204
    tab.go("#/new")
    tab.page.set_input_files("#import", archive)
    expect(tab.asked).to_have_text(["one", "two"])
    expect(tab.replies).to_have_text(said)
    tab.page.reload()
    expect(tab.lines).to_have_count(1)
    tab.say("three")
    counts = tab.counts(0)  # the only turn that this tab knows the figures of
    assert counts["recomputed"] == 0 < counts["restored"]


@pytest.mark.parametrize("damage", ["cut", "flipped", "none at all"])
def test_a_bad_archive_is_refused_and_leaves_nothing(
    tab: Tab, at: Served, archive: Path, damage: str
) -> None:
    content = bytearray(archive.read_bytes())
    if damage == "cut":
        del content[len(content) // 2 :]
    elif damage == "flipped":
        content[len(content) // 2] ^= 1
    else:
        content = bytearray(b"\x89PNG no archive")
    archive.write_bytes(content)
    before = at.client.get("/v1/sessions").json()["data"]
    tab.page.set_input_files("#import", archive)
    expect(tab.notice).to_contain_text("400 ")
    tab.button("Dismiss").click()
    expect(tab.notice).to_have_count(0)
    assert at.client.get("/v1/sessions").json()["data"] == before
    tab.say("three")


def test_a_phone_shows_what_becomes_of_an_archive(open_tab: OpenTab, archive: Path) -> None:
    phone = open_tab(viewport=PHONE).go()
    bad = archive.with_name("bad.tenuto")
    bad.write_bytes(archive.read_bytes()[:-100])
    phone.page.set_input_files("#import", bad)
    expect(phone.notice).to_be_visible()
    expect(phone.notice).to_contain_text("400 ")
    phone.page.set_input_files("#import", archive)
    expect(phone.asked).to_have_text(["one", "two"])
