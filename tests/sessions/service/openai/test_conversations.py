"""Conversations by OpenAI's own client: items in order, which responses add to, and nothing gets lost."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from sessions.service.ask import ChatMessage
from tests.sessions.service.openai.chatting import END
from tests.sessions.service.openai.conftest import LETTERS, House, Up, assistant, cached, user

MISSING = "conv_01ARZ3NDEKTSV4RRFFQ69G5FAV"


def texts(house: House, conversation: str) -> list[str]:
    """All that it has, in order."""
    items = house.api.conversations.items.list(conversation, order="asc", limit=7)
    return [item.content[0].text for item in items]


def message(text: str, role: str = "user") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


# --- conversations --------------------------------------------------------------------------------------


def test_a_conversation_is_created_changed_and_deleted(house: House) -> None:
    made = house.api.conversations.create(metadata={"topic": "tea"})
    assert made.id.startswith("conv_")
    assert (made.object, made.metadata) == ("conversation", {"topic": "tea"})
    assert abs(made.created_at - time.time()) < 60
    assert house.api.conversations.retrieve(made.id) == made
    changed = house.api.conversations.update(made.id, metadata={"topic": "coffee", "more": ""})
    assert changed.metadata == {"topic": "coffee", "more": ""}
    assert (changed.id, changed.created_at) == (made.id, made.created_at)
    assert house.api.conversations.update(made.id, metadata=None).metadata == {}
    gone = house.api.conversations.delete(made.id)
    assert (gone.id, gone.object, gone.deleted) == (made.id, "conversation.deleted", True)
    with pytest.raises(openai.NotFoundError):
        house.api.conversations.retrieve(made.id)


def test_metadata_is_small(house: House) -> None:
    most = {f"{at:064d}": "é" * 512 for at in range(16)}
    made = house.api.conversations.create(metadata=most)
    assert house.api.conversations.retrieve(made.id).metadata == most
    for metadata in ({**most, "more": ""}, {"k" * 65: ""}, {"k": "v" * 513}, {"k": 3}):
        for path in ("/v1/conversations", f"/v1/conversations/{made.id}"):
            answer = house.post(path, {"metadata": metadata})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"].startswith("metadata")


def test_items_are_added_listed_looked_at_and_taken_out(house: House) -> None:
    first = message("Be brief.", "developer")
    made = house.api.conversations.create(items=[first, message("Good morning.")])
    added = house.api.conversations.items.create(
        made.id, items=[message("Hm.", "assistant"), message("Why?"), message("And?")]
    )
    assert [item.content[0].text for item in added.data] == ["Hm.", "Why?", "And?"]
    assert texts(house, made.id) == ["Be brief.", "Good morning.", "Hm.", "Why?", "And?"]
    items = list(house.api.conversations.items.list(made.id, order="asc"))
    assert [item.role for item in items] == ["developer", "user", "assistant", "user", "user"]
    assert [item.content[0].type for item in items[:3]] == ["input_text", "input_text", "output_text"]
    assert [item.id for item in items[2:]] == [item.id for item in added.data]
    assert len({item.id for item in items}) == 5
    for item in items:
        assert house.api.conversations.items.retrieve(item.id, conversation_id=made.id) == item
    left = house.api.conversations.items.delete(items[3].id, conversation_id=made.id)
    assert left.id == made.id
    assert texts(house, made.id) == ["Be brief.", "Good morning.", "Hm.", "And?"]
    stayed = list(house.api.conversations.items.list(made.id, order="asc"))
    assert [item.id for item in stayed] == [item.id for item in items if item.id != items[3].id]
    for gone in (items[3].id, "msg_01ARZ3NDEKTSV4RRFFQ69G5FAV_0", "msg_x", "../x"):
        path = f"/v1/conversations/{made.id}/items/{gone}"
        assert {house.ask(method, path).status_code for method in ("GET", "DELETE")} == {404}


def test_items_are_listed_page_by_page_the_last_first(house: House) -> None:
    made = house.api.conversations.create(items=[message(str(number)) for number in range(15)])
    down = house.api.conversations.items.list(made.id, limit=4)
    assert [item.content[0].text for item in down.data] == ["14", "13", "12", "11"]
    assert (down.has_more, down.last_id) == (True, down.data[-1].id)
    assert [item.content[0].text for item in down] == [str(number) for number in reversed(range(15))]
    assert texts(house, made.id) == [str(number) for number in range(15)]
    empty = house.api.conversations.items.list(house.api.conversations.create().id)
    assert (empty.data, empty.has_more) == ([], False)


def test_no_more_than_twenty_items_are_added_at_once(house: House) -> None:
    made = house.api.conversations.create()
    body = {"items": [message("x")] * 21}
    for path in ("/v1/conversations", f"/v1/conversations/{made.id}/items"):
        assert house.post(path, body).json()["error"]["param"] == "items"
    assert house.post(f"/v1/conversations/{made.id}/items", {"items": []}).status_code == 400


def test_what_is_added_at_once_is_all_there(house: House) -> None:
    made = house.api.conversations.create()
    names = [f"client {number}" for number in range(8)]

    def add(name: str) -> list[str]:
        ids = []
        for turn in range(3):
            items = [message(f"{name}, {turn}, {part}") for part in "ab"]
            ids += [item.id for item in house.api.conversations.items.create(made.id, items=items).data]
        return ids

    with ThreadPoolExecutor(len(names)) as pool:
        told = [each for ids in pool.map(add, names) for each in ids]
    found = texts(house, made.id)
    assert sorted(found) == sorted(
        f"{name}, {turn}, {part}" for name in names for turn in range(3) for part in "ab"
    )
    for at in range(0, len(found), 2):  # what came together stays together
        assert found[at][:-1] == found[at + 1][:-1]
    assert {item.id for item in house.api.conversations.items.list(made.id)} == set(told)


# --- with responses -------------------------------------------------------------------------------------


def test_a_response_goes_on_from_its_conversation_and_is_added_to_it(house: House) -> None:
    made = house.api.conversations.create(items=[message("Good morning.")])
    first = house.respond("And then?", conversation=made.id)
    assert first.conversation.id == made.id
    second = house.respond([user("Who?"), user("Who says so?")], conversation={"id": made.id})
    assert cached(first) == 0
    assert cached(second) == first.usage.total_tokens - 1
    said = [
        *("Good morning.", "And then?", first.output_text),
        *("Who?", "Who says so?", second.output_text),
    ]
    assert texts(house, made.id) == said
    items = list(house.api.conversations.items.list(made.id, order="asc"))
    assert (items[2].id, items[5].id) == (first.output[0].id, second.output[0].id)
    given = house.api.responses.input_items.list(second.id, order="asc")
    assert [item.id for item in given] == [items[3].id, items[4].id]
    assert house.api.responses.retrieve(second.id) == second


def test_it_says_what_a_chat_with_all_of_it_says(house: House) -> None:
    made = house.api.conversations.create(items=[message("Be brief.", "system"), message("Good morning.")])
    first = house.respond("And then?", conversation=made.id)
    second = house.respond("Why?", conversation=made.id)
    messages = [{"role": "system", "content": "Be brief."}, user("Good morning."), user("And then?")]
    messages += [assistant(first.output_text), user("Why?")]
    assert house.chat(messages).choices[0].message.content == second.output_text


def test_instructions_are_no_item(house: House) -> None:
    made = house.api.conversations.create()
    first = house.respond("Good morning.", conversation=made.id, instructions="Be brief.")
    assert texts(house, made.id) == ["Good morning.", first.output_text]
    again = house.respond("And?", conversation=made.id, instructions="Be brief.")
    assert cached(again) == first.usage.total_tokens - 1
    without = house.respond("And?", conversation=made.id)
    count = house.backend.count([ChatMessage("user", "Good morning.")])
    assert without.usage.input_tokens < again.usage.input_tokens + count


def test_an_item_that_was_taken_out_was_never_said(house: House) -> None:
    made = house.api.conversations.create(items=[message("Good morning.")])
    aside = house.api.conversations.items.create(made.id, items=[message("A secret.")])
    first = house.respond("And then?", conversation=made.id, extra_body=LETTERS)
    house.api.conversations.items.delete(aside.data[0].id, conversation_id=made.id)
    second = house.respond("Why?", conversation=made.id)
    messages = [user("Good morning."), user("And then?"), assistant(first.output_text), user("Why?")]
    never = house.chat(messages, extra_body={"cache_salt": "never"})
    assert second.usage.input_tokens == never.usage.prompt_tokens
    assert second.output_text == never.choices[0].message.content
    assert 0 < cached(second) < first.usage.input_tokens
    assert texts(house, made.id) == [
        "Good morning.",
        "And then?",
        first.output_text,
        "Why?",
        second.output_text,
    ]


def test_a_response_that_is_deleted_stays_in_its_conversation(house: House) -> None:
    made = house.api.conversations.create()
    first = house.respond("Good morning.", conversation=made.id)
    house.api.responses.delete(first.id)
    second = house.respond("And then?", conversation=made.id)
    assert texts(house, made.id) == ["Good morning.", first.output_text, "And then?", second.output_text]


def test_a_conversation_that_is_deleted_leaves_its_responses(house: House) -> None:
    made = house.api.conversations.create()
    first = house.respond("Good morning.", conversation=made.id)
    house.api.conversations.delete(made.id)
    assert house.api.responses.retrieve(first.id) == first
    with pytest.raises(openai.NotFoundError) as caught:
        house.respond("And then?", conversation=made.id)
    assert caught.value.param == "conversation"
    aside = house.respond("And then?", previous_response_id=first.id)
    assert cached(aside) == first.usage.total_tokens - 1


def test_a_response_that_is_not_kept_is_said_in_its_conversation_all_the_same(house: House) -> None:
    made = house.api.conversations.create()
    first = house.respond("Good morning.", conversation=made.id, store=False)
    assert texts(house, made.id) == ["Good morning.", first.output_text]
    second = house.respond("And then?", conversation=made.id)
    assert cached(second) == 0
    assert texts(house, made.id)[-1] == second.output_text


def test_a_stream_adds_what_it_said_before_it_says_that_it_is_complete(house: House) -> None:
    made = house.api.conversations.create()
    events = list(house.respond("Good morning.", conversation=made.id, stream=True))
    assert texts(house, made.id) == ["Good morning.", events[-1].response.output_text]
    assert events[-1].response.conversation.id == made.id


def test_what_nobody_heard_to_its_end_is_in_no_conversation(house: House) -> None:
    made = house.api.conversations.create(items=[message("Good morning.")])
    stream = house.respond(
        "And?",
        conversation=made.id,
        max_output_tokens=900,
        stream=True,
        extra_body={"logit_bias": {str(END): -100}},
    )
    next(iter(stream))
    stream.close()
    until = time.monotonic() + 20
    while house.backend.load().running and time.monotonic() < until:
        time.sleep(0.01)
    assert texts(house, made.id) == ["Good morning."]


def test_responses_at_once_are_all_added(house: House) -> None:
    made = house.api.conversations.create()
    asked = [f"Number {number}?" for number in range(5)]
    with ThreadPoolExecutor(len(asked)) as pool:
        replies = list(pool.map(lambda text: house.respond(text, conversation=made.id), asked))
    found = texts(house, made.id)
    pairs = {(found[at], found[at + 1]) for at in range(0, len(found), 2)}
    assert pairs == {(text, reply.output_text) for text, reply in zip(asked, replies, strict=True)}


def test_a_restart_and_another_worker_change_nothing(up: Up) -> None:
    with up() as house:
        made = house.api.conversations.create(metadata={"a": "b"}, items=[message("Good morning.")])
        first = house.respond("And then?", conversation=made.id)
        before = list(house.api.conversations.items.list(made.id))
    with up() as one, up() as two:
        assert one.api.conversations.retrieve(made.id) == made
        assert list(one.api.conversations.items.list(made.id)) == before
        second = one.respond("Why?", conversation=made.id)
        third = two.respond("Who?", conversation=made.id)
        assert cached(second) == first.usage.total_tokens - 1
        assert cached(third) == second.usage.total_tokens - 1
        assert texts(one, made.id) == texts(two, made.id)


# --- whose they are ---------------------------------------------------------------------------------------


def test_another_tenants_conversations_are_not_there(house: House) -> None:
    made = house.api.conversations.create(items=[message("Good morning.")])
    (item,) = house.api.conversations.items.list(made.id)
    other = house.of(f"{house.tenant}-other")
    for method, path, body in (
        ("GET", "", None),
        ("POST", "", {"metadata": {}}),
        ("DELETE", "", None),
        ("GET", "/items", None),
        ("POST", "/items", {"items": [message("x")]}),
        ("GET", f"/items/{item.id}", None),
        ("DELETE", f"/items/{item.id}", None),
    ):
        assert other.ask(method, f"/v1/conversations/{made.id}{path}", json=body).status_code == 404
    with pytest.raises(openai.NotFoundError):
        other.respond("Hello.", conversation=made.id)
    assert texts(house, made.id) == ["Good morning."]


@pytest.mark.parametrize(
    "name", [MISSING, "conv_x", "resp_01ARZ3NDEKTSV4RRFFQ69G5FAV", "..%2f..%2fetc", "%00", "ü"]
)
def test_an_id_that_is_nobodys_is_not_found(house: House, name: str) -> None:
    for method, body in (("GET", None), ("POST", {"metadata": {}}), ("DELETE", None)):
        answer = house.ask(method, f"/v1/conversations/{name}", json=body)
        assert answer.status_code == 404
    assert house.ask("GET", f"/v1/conversations/{name}/items").status_code == 404


def test_a_session_that_is_no_conversation_is_none(house: House) -> None:
    session = house.backend.create(house.tenant, system="Be brief.")
    response = house.respond("Hello.")
    for name in (session.id, response.id.removeprefix("resp_")):
        assert house.ask("GET", f"/v1/conversations/conv_{name}").status_code == 404
        answer = house.post(f"/v1/conversations/conv_{name}/items", {"items": [message("x")]})
        assert answer.status_code == 404
        assert house.ask("DELETE", f"/v1/conversations/conv_{name}").status_code == 404
    assert house.backend.get(house.tenant, session.id).messages[0].text == "Be brief."


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"items": "x"}, "items"),
        ({"items": [3]}, "items[0]"),
        ({"items": [{"role": "user"}]}, "items[0].content"),
        ({"items": [{"type": "reasoning", "id": "x"}]}, "items[0].type"),
        ({"items": [{"type": 3}]}, "items[0].type"),
        ({"items": [{"role": "king", "content": "x"}]}, "items[0].role"),
        ({"metadata": []}, "metadata"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
def test_bodies_of_a_wrong_shape_are_told_what_is_wrong(house: House, body: Any, param: str) -> None:
    answer = house.post("/v1/conversations", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param)


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "order=up", "after=" + "x" * 200])
def test_pages_that_cannot_be_are_refused(house: House, query: str) -> None:
    made = house.api.conversations.create()
    answer = house.ask("GET", f"/v1/conversations/{made.id}/items?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == query.partition("=")[0]
