"""Whatever is said, named or titled is shown as the text that it is."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import expect

from tests.sessions.service.page.tab import Tab
from tests.sessions.service.serving import Served

WICKED = (
    '<img src=x onerror="window.harmed = 1">',
    "</script><script>window.harmed = 1</script>",
    '"><svg onload="window.harmed = 1">',
    "javascript:window.harmed = 1",
    "<b>bold</b> &amp; &lt;i&gt; \u202e\u2066 </textarea></title>",
)


@pytest.mark.parametrize("text", WICKED)
def test_no_text_becomes_markup(tab: Tab, at: Served, text: str) -> None:
    made = at.client.post("/v1/sessions", json={"title": text, "system": text}).json()
    tab.go(f"#/s/{made['id']}")
    expect(tab.page.locator("h1")).to_have_text(text)
    tab.say(text)
    tab.button("Forks").click()
    expect(tab.lines.locator(".called")).to_have_text(text)
    for shown in (tab.page.locator(".message.system .words"), tab.asked):
        assert shown.text_content() == text
    assert tab.page.locator(".main b, .main i, .main img, .main svg, .main script").count() == 0
    assert tab.page.evaluate("window.harmed") is None
    assert text in tab.page.title()


def test_what_a_model_says_is_text(tab: Tab, at: Served) -> None:
    said = "".join(WICKED)
    answer = [
        ("begun", {"session": None, "prompt_tokens": 3, "restored": _restored(said)}),
        *(("piece", {"token": 1, "text": text, "finish": None}) for text in WICKED),
        ("error", {"error": {"message": said, "code": said}}),
    ]
    body = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in answer)
    tab.go().say("one")
    tab.page.route("**/messages", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    tab.words.fill("two")
    tab.words.press("Enter")
    expect(tab.notice).to_contain_text("<img src=x")
    assert tab.page.locator(".main b, .main i, .main img, .main svg, .main script").count() == 0
    assert tab.page.evaluate("window.harmed") is None


def _restored(text: str) -> dict[str, object]:
    return {"reason": text, "restored_tokens": 1, "recomputed_tokens": 1, "seconds": 0.1, "detail": text}


@pytest.mark.parametrize(
    "hash", ["#/s/<img src=x onerror=alert(1)>", "#/s/..%2f..%2fetc", "#/s/%E0%A4", "#//", "#/s/a/b"]
)
def test_no_address_is_more_than_a_name(tab: Tab, hash: str) -> None:
    tab.go(hash)
    expect(tab.page.locator("#lines")).to_contain_text("no conversation yet")
    assert tab.page.locator(".main img").count() == 0


def test_the_policy_holds_what_a_fault_of_ours_would_let_in(tab: Tab) -> None:
    tab.go()
    expect(tab.page.locator("#lines")).to_contain_text("no conversation yet")
    harms = (
        "document.body.innerHTML = '<img src=x onerror=\"window.harmed=1\">'",
        "document.body.append(Object.assign(document.createElement('script'), { text: 'window.harmed=1' }))",
    )
    for harm in harms:
        done = tab.page.evaluate(
            f"() => {{ try {{ {harm}; return 'done' }} catch (error) {{ return error.name }} }}"
        )
        assert done == "TypeError", harm
    assert tab.page.evaluate("window.harmed") is None
    tab.complaints.clear()


def test_a_very_long_message_is_shortened_until_it_is_asked_for(tab: Tab, at: Served) -> None:
    text = "\n".join(f"line {number} of many, each with some words" for number in range(120))
    made = at.client.post("/v1/sessions", json={"system": text}).json()
    tab.go(f"#/s/{made['id']}")
    words = tab.page.locator(".message.system .words")
    low = words.bounding_box()
    more = tab.page.get_by_role("button", name="Show all")
    expect(more).to_have_attribute("aria-expanded", "false")
    more.click()
    high = words.bounding_box()
    assert low is not None
    assert high is not None
    assert low["height"] < 400 < 2000 < high["height"]
    assert words.text_content() == text
