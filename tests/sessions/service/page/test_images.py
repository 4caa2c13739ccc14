"""The docs' pictures of the page: real conversations with a real model. `make images` makes them anew; here
they are made into a folder of the test, and those of the docs are looked at."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import expect

from tests.sessions.service.page.conftest import DESKTOP, PHONE, OpenTab
from tests.sessions.service.page.tab import Tab
from tests.sessions.service.serving import Served
from tests.sessions.service.test_serve import serving

DOCS = Path(__file__).parents[4] / "docs"
#: Where they are to go; read before a test's settings are taken away.
CHOSEN = os.environ.get("TENUTO_IMAGES")
NAMES = ("page.png", "page-storage.png", "page-phone.png", "page-phone-forks.png")
#: Of one picture, so that a clone stays small.
MOST = 150_000

pytestmark = [pytest.mark.real]


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = Path(CHOSEN) if CHOSEN else tmp_path / "images"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def at(smollm2_path: Path, tmp_path: Path) -> Iterator[Served]:
    with serving(smollm2_path, tmp_path / "store") as process:
        yield Served(process.url, httpx.Client(), None)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_pictures_are_made_by_talking(open_tab: OpenTab, at: Served, images: Path) -> None:
    tab = open_tab(at, longest=90, viewport=DESKTOP).go()
    tab.page.evaluate("sessionStorage.setItem('tenuto.settings', '{\"max_tokens\": 90, \"temperature\": 0}')")
    tab.go("#/new")
    tab.say("What is the capital of Norway?").say("Name three things to see there.")
    first = tab.session
    tab.act("A new conversation that goes on from here", 0)
    expect(tab.asked).to_have_count(1)
    tab.say("Which language is spoken there?")
    tab.page.locator("#new").click()
    expect(tab.page.locator("h1")).to_have_text("A new conversation")
    tab.say("Write one sentence about the sea.")
    tab.button("Forks").click()
    tab.page.locator(f"#lines a[data-id='{first}']").click()
    expect(tab.bars).to_have_count(2)
    take(tab, images / "page.png")
    tab.page.locator("#storage").click()
    tab.page.locator("#dry-run").click()
    expect(tab.page.locator(".plan")).to_contain_text("It would free")
    take(tab, images / "page-storage.png")
    tab.page.set_viewport_size(PHONE)  # type: ignore[arg-type]
    tab.page.emulate_media(color_scheme="dark")
    tab.go(f"#/s/{first}")
    expect(tab.bars).to_have_count(2)
    tab.page.locator("h1").click()
    take(tab, images / "page-phone.png")
    tab.go("#/")
    expect(tab.lines).to_have_count(3)
    take(tab, images / "page-phone-forks.png")
    assert {path.name for path in images.iterdir()} == set(NAMES)


def take(tab: Tab, path: Path) -> None:
    tab.page.mouse.move(0, 0)
    tab.page.screenshot(path=path, animations="disabled", caret="hide")
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    assert {"width": width, "height": height} in (DESKTOP, PHONE)
    assert path.stat().st_size < MOST


@pytest.mark.parametrize("name", NAMES)
def test_the_docs_show_it(name: str) -> None:
    assert f"](images/{name})" in (DOCS / "service.md").read_text("utf-8")
    assert 0 < (DOCS / "images" / name).stat().st_size < MOST
