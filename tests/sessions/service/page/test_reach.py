"""The page by keyboard alone, on a phone, in the dark, and without anything that jumps."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests.sessions.service.page.conftest import NARROW, PHONE, OpenTab
from tests.sessions.service.page.tab import Tab
from tests.sessions.service.serving import Served

FOCUSED = "document.activeElement"


NAME = f"""() => {{
  const node = {FOCUSED};
  return node.ariaLabel || node.labels?.[0]?.textContent || node.textContent || node.id;
}}"""


def focused(page: Page) -> str:
    """What has the focus, by its name."""
    return str(page.evaluate(NAME)).strip()


def tab_to(page: Page, name: str, key: str = "Tab") -> None:
    met = []
    for _ in range(60):
        page.keyboard.press(key)
        met.append(focused(page))
        if met[-1].startswith(name):
            assert page.evaluate(f"{FOCUSED}.matches(':focus-visible')")
            return
    raise AssertionError(f"{name} is not reached: {met}")


def test_all_of_it_is_done_by_keyboard(tab: Tab, at: Served) -> None:
    tab.go()
    page = tab.page
    expect(tab.words).to_be_focused()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("more of it")
    page.keyboard.press("Enter")
    expect(tab.asked).to_have_text("one\nmore of it")
    tab.rest()
    expect(tab.words).to_be_focused()
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    expect(tab.asked).to_have_count(2)
    tab.rest()
    first = tab.session
    tab_to(page, "Say this reply anew", "Shift+Tab")
    with tab.answered("/regenerate"):
        page.keyboard.press("Enter")
    expect(tab.words).to_be_focused()
    tab.rest()
    expect(page.locator("#said")).to_have_text(tab.replies.last.text_content() or "")
    tab_to(page, "Say something else instead", "Shift+Tab")
    page.keyboard.press("Space")
    expect(page.locator("#edit")).to_be_focused()
    page.keyboard.press("Escape")
    expect(tab.words).to_be_focused()
    tab_to(page, "A new conversation that goes on from here", "Shift+Tab")
    page.keyboard.press("Enter")
    expect(tab.lines).to_have_count(2)
    expect(tab.words).to_be_focused()
    assert tab.session != first
    tab_to(page, "Take this turn back", "Shift+Tab")
    page.keyboard.press("Enter")
    expect(tab.asked).to_have_count(1)
    expect(tab.words).to_be_focused()
    page.locator("#containing").focus()
    tab_to(page, "Forks")
    page.keyboard.press("Enter")
    expect(page.locator("#as-tree")).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(tab.asked).to_have_count(1 if tab.session != first else 2)
    tab_to(page, "Import…", "Shift+Tab")
    tab_to(page, "Storage")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("Storage")
    tab_to(page, "What would gc take?")
    page.keyboard.press("Enter")
    expect(page.locator(".plan")).to_contain_text("It would free")


def test_the_first_stop_skips_the_list(tab: Tab) -> None:
    tab.go("#/storage")
    expect(tab.page.locator("h1")).to_have_text("Storage")
    tab.page.keyboard.press("Tab")
    assert focused(tab.page) == "Skip to the conversation"
    expect(tab.page.locator("#skip")).to_be_in_viewport()
    tab.page.keyboard.press("Enter")
    assert tab.page.evaluate(f"{FOCUSED}.id") == "main"
    assert tab.page.url.endswith("#/storage")


def test_everything_that_can_be_used_has_a_name(tab: Tab) -> None:
    tab.go().say("one")
    for hash in ("", f"#/s/{tab.session}", "#/storage"):
        tab.go(hash)
        expect(tab.page.locator("h1")).to_be_visible()
        nameless = tab.page.evaluate(
            """() => [...document.querySelectorAll("a, button, input, textarea, summary")]
              .filter((node) => !(node.ariaLabel || node.labels?.length || node.textContent.trim()))
              .map((node) => node.outerHTML)"""
        )
        assert nameless == []


@pytest.mark.parametrize("size", [NARROW, PHONE], ids=["360", "390"])
def test_on_a_phone_nothing_is_wider_than_the_screen(
    open_tab: OpenTab, at: Served, size: dict[str, int]
) -> None:
    tab = open_tab(viewport=size, is_mobile=True, has_touch=True)
    page = tab.page
    long = "averylongwordthatgoesonandon" * 12
    at.client.post("/v1/sessions", json={"title": long[:200], "name": "n" * 64, "system": f"{long} {long}"})
    tab.go()
    expect(tab.lines).to_have_count(1)
    fits(page)
    tab.lines.tap()
    expect(page.locator(".message.system")).to_be_visible()
    expect(page.locator(".side")).to_be_hidden()
    tab.words.fill(long)
    page.locator("#send").tap()
    tab.rest()
    expect(tab.bars).to_have_count(1)
    fits(page)
    tab.button("What else can be done with it").tap()
    expect(tab.button("Download")).to_be_visible()
    fits(page)
    page.keyboard.press("Escape")
    expect(tab.button("Download")).to_be_hidden()
    page.get_by_text("Reply settings").tap()
    fits(page)
    page.get_by_role("link", name="‹ All").tap()
    expect(page.locator(".side")).to_be_visible()
    page.locator("#storage").tap()
    expect(page.get_by_text("By purpose")).to_be_visible()
    fits(page)


#: What reaches beyond the screen, but for what is cut off with an ellipsis.
WIDE = """() => [...document.querySelectorAll("body *")].filter((node) => {
  const { width, right } = node.getBoundingClientRect();
  return width > 1 && right > innerWidth + 1 && !node.closest(".facts, .title");
}).map((node) => `${node.tagName} ${node.className}`)"""
#: What can be pushed aside.
SCROLLED = """() => [document.documentElement, ...document.querySelectorAll(".turns, .lines")]
  .filter((node) => node.scrollWidth > node.clientWidth).map((node) => node.className)"""


def fits(page: Page) -> None:
    shown = page.locator(".side:visible, .main:visible").bounding_box()
    assert shown is not None
    assert (shown["x"], shown["width"]) == (0, page.evaluate("innerWidth"))
    assert page.evaluate(WIDE) == []
    assert page.evaluate(SCROLLED) == []


WATCH = """
  window.shifted = 0;
  new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) window.shifted += entry.value;
  }).observe({ type: "layout-shift", buffered: true });
"""


def test_nothing_jumps(tab: Tab) -> None:
    tab.page.add_init_script(WATCH)
    tab.go().say("one").say("two")
    tab.page.reload()
    expect(tab.replies).to_have_count(2)
    tab.page.locator("#storage").click()
    expect(tab.page.get_by_text("By purpose")).to_be_visible()
    assert (
        tab.page.evaluate("new Promise((done) => requestAnimationFrame(() => done(window.shifted)))") < 0.05
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_the_paper(open_tab: OpenTab, scheme: str) -> None:
    tab = open_tab(color_scheme=scheme).go().say("one")
    for place in (
        "h1",
        ".asked, .words",
        ".legend",
        ".head .facts",
        ".line .facts",
        ".actions button",
        "#new",
        "#send",
    ):
        assert tab.page.locator(place).first.evaluate(CONTRAST) >= 4.5, place


#: By the formula of WCAG 2, of a colour on the nearest paper below it.
CONTRAST = """(node) => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const parts = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  const light = (color) => {
    const [r, g, b] = parts(color).map((part) => linear(part / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  let paper = node;
  while (parts(getComputedStyle(paper).backgroundColor)[3] < 255) paper = paper.parentElement;
  const [a, b] = [light(getComputedStyle(node).color), light(getComputedStyle(paper).backgroundColor)];
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}"""
