"""A conversation on the page: said, said anew, said otherwise, forked, taken back, and found again."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from sessions.service.backend import Backend
from tests.sessions.service.conftest import MakeBackend
from tests.sessions.service.page.conftest import OpenTab
from tests.sessions.service.page.tab import Tab
from tests.sessions.service.serving import Served, served


@pytest.fixture
def talk(tab: Tab) -> Tab:
    """Two turns were said."""
    return tab.go().say("one").say("two")


def test_a_reply_is_shown_as_it_is_stored(tab: Tab, at: Served) -> None:
    tab.go().say("hello")
    stored = at.client.get(f"/v1/sessions/{tab.session}").json()
    assert [message["content"] for message in stored["messages"]] == ["hello", tab.replies.inner_text()]
    expect(tab.page.locator("h1")).to_have_text("hello")
    expect(tab.lines).to_have_count(1)
    expect(tab.lines).to_have_attribute("aria-current", "page")


def test_pieces_are_shown_while_they_come(open_tab: OpenTab, make_backend: MakeBackend) -> None:
    with served(make_backend(n_ctx=8192, num_cells=16384)) as at:
        tab = open_tab(at, longest=8000).go()
        tab.words.fill("on and on")
        tab.words.press("Enter")
        growing = tab.page.locator(".growing .words")
        expect(growing).not_to_have_text("")
        expect(tab.page.locator(".growing details.told")).to_be_visible()
        tab.words.press("Escape")
        tab.rest()
        stored = at.client.get(f"/v1/sessions/{tab.session}").json()
        assert stored["messages"][-1]["content"] == tab.replies.text_content()
        expect(tab.bars.locator(".ending")).to_have_text("stopped")
        tab.words.fill("and now?")
        tab.words.press("Enter")
        expect(growing).not_to_have_text("")
        tab.button("Stop").click()
        tab.rest()
        expect(tab.replies).to_have_count(2)


def test_each_turn_tells_what_was_restored_and_why(talk: Tab, at: Served) -> None:
    first, second = talk.counts(0), talk.counts(1)
    assert first["restored"] == first["recomputed"] == 0 < first["new"]
    assert second["recomputed"] == 0 < second["restored"]
    expect(talk.bars.nth(1).locator(".reason")).to_have_text("exact")
    talk.bars.nth(1).locator("summary").click()
    expect(talk.bars.nth(1).locator(".why")).to_contain_text("bit for bit")
    wide, narrow = (
        talk.bars.nth(1).locator(f".bar .{kind}").bounding_box() for kind in ("restored", "fresh")
    )
    assert wide is not None
    assert narrow is not None
    assert abs(wide["width"] / narrow["width"] - second["restored"] / second["new"]) < 0.2


def test_a_reload_loses_nothing(talk: Tab) -> None:
    texts, counts = talk.replies.all_inner_texts(), [talk.counts(0), talk.counts(1)]
    talk.page.reload()
    expect(talk.replies).to_have_text(texts)
    assert [talk.counts(0), talk.counts(1)] == counts


def test_another_tab_shows_the_same_and_invents_no_bars(talk: Tab, open_tab: OpenTab) -> None:
    other = open_tab().go(f"#/s/{talk.session}")
    expect(other.replies).to_have_text(talk.replies.all_inner_texts())
    expect(other.bars).to_have_count(0)
    expect(other.page.locator(".untold").first).to_contain_text("tokens")


def test_a_reply_that_was_said_anew_elsewhere_has_no_bar_of_the_one_before(talk: Tab, at: Served) -> None:
    body = {"max_tokens": 8, "sampler": {"temperature": 1.0, "seed": 77}}
    assert at.client.post(f"/v1/sessions/{talk.session}/regenerate", json=body).status_code == 200
    talk.page.reload()
    expect(talk.replies).to_have_count(2)
    expect(talk.bars).to_have_count(1)
    expect(talk.page.locator(".untold")).to_have_count(1)


def test_regenerate_says_the_last_reply_anew(talk: Tab, at: Served) -> None:
    before = talk.replies.last.inner_text()
    with talk.answered("/regenerate"):
        talk.act("Say this reply anew", 1)
    talk.rest()
    stored = at.client.get(f"/v1/sessions/{talk.session}").json()["messages"]
    assert [message["role"] for message in stored] == ["user", "assistant"] * 2
    assert stored[-1]["content"] == talk.replies.last.text_content() != before
    expect(talk.bars).to_have_count(2)


def test_edit_puts_another_text_in_place_of_the_last(talk: Tab, at: Served) -> None:
    talk.act("Say something else instead", 1)
    field = talk.page.locator("#edit")
    expect(field).to_be_focused()
    expect(field).to_have_value("two")
    field.fill("three")
    field.press("Enter")
    expect(talk.asked).to_have_text(["one", "three"])
    talk.rest()
    stored = at.client.get(f"/v1/sessions/{talk.session}").json()["messages"]
    assert [message["content"] for message in stored][::2] == ["one", "three"]


def test_an_edit_that_is_given_up_changes_nothing(talk: Tab) -> None:
    talk.act("Say something else instead", 1)
    talk.page.locator("#edit").fill("three")
    talk.page.locator("#edit").press("Escape")
    expect(talk.page.locator("#edit")).to_have_count(0)
    expect(talk.asked).to_have_text(["one", "two"])


def test_an_earlier_message_is_edited_in_a_fork(talk: Tab, at: Served) -> None:
    origin = talk.session
    talk.act("in a fork", 0)
    talk.page.locator("#edit").fill("otherwise")
    talk.button("Say this in a fork").click()
    expect(talk.asked).to_have_text(["otherwise"])
    talk.rest()
    assert talk.session != origin
    forked, kept = (at.client.get(f"/v1/sessions/{each}").json() for each in (talk.session, origin))
    assert forked["parent"] == origin
    assert [message["content"] for message in forked["messages"]][::2] == ["otherwise"]
    assert [message["content"] for message in kept["messages"]][::2] == ["one", "two"]


def test_fork_goes_on_from_any_turn_and_the_tree_shows_it(talk: Tab, at: Served) -> None:
    origin, said = talk.session, talk.replies.all_inner_texts()
    talk.act("A new conversation that goes on from here", 0)
    expect(talk.asked).to_have_text(["one"])
    expect(talk.replies).to_have_text(said[:1])
    assert at.client.get(f"/v1/sessions/{talk.session}").json()["parent"] == origin
    talk.say("another two")
    assert talk.counts(1)["recomputed"] == 0 < talk.counts(1)["restored"]
    talk.button("Forks").click()
    branch = talk.page.locator(f"#lines li:has(> a[data-id='{origin}']) > ul a")
    expect(branch).to_have_attribute("data-id", talk.session)
    talk.page.get_by_role("link", name="its origin").click()
    expect(talk.asked).to_have_text(["one", "two"])


def test_rewind_takes_back_and_gives_the_words_back(talk: Tab, at: Served) -> None:
    talk.act("Take this turn back", 1)
    expect(talk.asked).to_have_text(["one"])
    expect(talk.words).to_have_value("two")
    expect(talk.notice).to_contain_text("Rewound")
    assert len(at.client.get(f"/v1/sessions/{talk.session}").json()["messages"]) == 2
    talk.say("two, again")
    assert talk.counts(1)["recomputed"] == 0


def test_to_rewind_more_than_one_turn_is_asked_first(talk: Tab) -> None:
    talk.act("Take back this turn", 0)
    talk.page.keyboard.press("Escape")
    expect(talk.page.locator("dialog")).to_have_count(0)
    expect(talk.asked).to_have_text(["one", "two"])
    talk.act("Take back this turn", 0)
    talk.page.locator("dialog").get_by_role("button", name="Rewind").click()
    expect(talk.asked).to_have_count(0)


def test_back_and_forward_go_between_conversations(talk: Tab) -> None:
    first = talk.session
    talk.page.locator("#new").click()
    expect(talk.page.locator("h1")).to_have_text("A new conversation")
    talk.say("something else")
    second = talk.session
    talk.page.go_back()
    talk.page.go_back()
    expect(talk.asked).to_have_text(["one", "two"])
    assert talk.session == first
    talk.page.go_forward()
    talk.page.go_forward()
    expect(talk.asked).to_have_text(["something else"])
    assert talk.session == second


def test_a_reply_goes_on_while_another_conversation_is_looked_at(
    open_tab: OpenTab, make_backend: MakeBackend
) -> None:
    with served(make_backend(n_ctx=4096, num_cells=16384)) as at:
        tab = open_tab(at, longest=400).go().say("first")
        first = tab.session
        tab.words.fill("on and on")
        tab.words.press("Enter")
        expect(tab.page.locator(".growing .words")).not_to_have_text("")
        tab.page.locator("#storage").click()
        expect(tab.page.locator("h1")).to_have_text("Storage")
        tab.page.locator(f"#lines a[data-id='{first}']").click()
        tab.rest()
        stored = at.client.get(f"/v1/sessions/{first}").json()["messages"]
        assert len(stored) == 4
        assert tab.replies.last.text_content() == stored[-1]["content"]


def test_who_leaves_in_the_middle_finds_what_was_said(open_tab: OpenTab, make_backend: MakeBackend) -> None:
    backend: Backend = make_backend(n_ctx=8192, num_cells=16384)
    with served(backend) as at:
        tab = open_tab(at, longest=8000).go()
        tab.words.fill("on and on")
        tab.words.press("Enter")
        expect(tab.page.locator(".growing .words")).not_to_have_text("")
        session = tab.session
        tab.page.close()
        again = open_tab(at).go(f"#/s/{session}")
        expect(again.page.locator("h1")).not_to_be_empty()
        while backend.load().running:
            again.page.wait_for_timeout(50)
        again.page.reload()
        expect(again.replies).not_to_have_text("")
        again.say("go on")


def test_a_name_a_system_message_and_a_deletion(tab: Tab, at: Served) -> None:
    tab.go("#/new")
    tab.page.get_by_text("A system message, and a name").click()
    tab.page.locator("#system").fill("Be brief.")
    tab.page.locator("#new-name").fill("tea")
    tab.say("green or black?")
    expect(tab.page.locator(".message.system .words")).to_have_text("Be brief.")
    assert at.client.get("/v1/sessions/tea").status_code == 200
    tab.button("Rename").click()
    tab.page.locator("#name").fill("coffee")
    tab.page.locator("dialog").get_by_role("button", name="Rename").click()
    expect(tab.page.locator(".head .facts")).to_contain_text("coffee")
    assert at.client.get("/v1/sessions/coffee").status_code == 200
    tab.button("Delete").click()
    tab.page.locator("dialog").get_by_role("button", name="Delete").click()
    expect(tab.lines).to_have_count(0)
    assert at.client.get("/v1/sessions/coffee").status_code == 404


def test_a_conversation_is_opened_by_its_name_too(tab: Tab, at: Served) -> None:
    made = at.client.post("/v1/sessions", json={"name": "tea", "title": "Green or black"}).json()
    tab.go("#/s/tea")
    expect(tab.lines).to_have_attribute("aria-current", "page")
    assert tab.session == made["id"]
    tab.say("one")
    expect(tab.lines).to_have_count(1)


def test_a_conversation_that_is_not_there_is_told_of(tab: Tab) -> None:
    tab.go(f"#/s/{'0' * 26}")
    expect(tab.notice).to_contain_text("404 session_not_found")
