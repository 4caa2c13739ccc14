"""Responses by OpenAI's own client: a tree that is kept, and that any worker can go on from at any time."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.sessions.service.openai.chatting import END
from tests.sessions.service.openai.conftest import LETTERS, House, Up, assistant, cached, user

MISSING = "resp_01ARZ3NDEKTSV4RRFFQ69G5FAV"


def not_found(house: House, **more: Any) -> openai.NotFoundError:
    with pytest.raises(openai.NotFoundError) as caught:
        house.respond("Hello.", **more)
    return caught.value


# --- one response ---------------------------------------------------------------------------------------


def test_a_response_has_the_shape_that_clients_know(house: House) -> None:
    reply = house.respond("Good morning.", instructions="Be brief.", metadata={"a": "b"}, temperature=0.5)
    assert reply.id.startswith("resp_")
    assert (reply.object, reply.status) == ("response", "incomplete")
    assert reply.incomplete_details.reason == "max_output_tokens"
    assert abs(reply.created_at - time.time()) < 60
    (item,) = reply.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "incomplete")
    assert item.id.startswith("msg_")
    assert reply.output_text == item.content[0].text != ""
    assert (reply.instructions, reply.metadata, reply.temperature) == ("Be brief.", {"a": "b"}, 0.5)
    assert (reply.previous_response_id, reply.conversation, reply.error) == (None, None, None)
    assert reply.usage.output_tokens == 12
    assert reply.usage.total_tokens == reply.usage.input_tokens + 12


def test_what_was_kept_is_what_was_said(house: House) -> None:
    for more in ({}, {"instructions": "Be brief.", "metadata": {"k": "v" * 512}}, {"max_output_tokens": 3}):
        reply = house.respond("Good morning.", **more)
        assert house.api.responses.retrieve(reply.id) == reply
        included = house.api.responses.retrieve(reply.id, include=["message.output_text.logprobs"])
        assert included == reply
    with pytest.raises(openai.BadRequestError) as caught:
        house.api.responses.retrieve(reply.id, stream=True)
    assert caught.value.param == "stream"


def test_a_reply_that_the_model_ends_is_complete(house: House) -> None:
    reply = house.respond("Good morning.", extra_body={"logit_bias": {str(END): 100}})
    assert (reply.status, reply.incomplete_details) == ("completed", None)
    assert reply.output[0].status == "completed"
    assert reply.completed_at >= reply.created_at
    assert house.api.responses.retrieve(reply.id) == reply


def test_a_response_says_what_a_chat_says(house: House) -> None:
    chat = house.chat([{"role": "system", "content": "Be brief."}, user("Good morning.")])
    for given in ("Good morning.", [user("Good morning.")], [{"type": "message", **user("Good morning.")}]):
        reply = house.respond(given, instructions="Be brief.")
        assert reply.output_text == chat.choices[0].message.content
        assert reply.usage.input_tokens == chat.usage.prompt_tokens
    with_developer = house.respond([{"role": "developer", "content": "Be brief."}, user("Good morning.")])
    assert with_developer.output_text == chat.choices[0].message.content


def test_items_may_be_what_was_answered_before(house: House) -> None:
    first = house.respond("Good morning.")
    again = house.respond([user("Good morning."), *first.output, user("And?")])
    assert cached(again) == first.usage.total_tokens - 1
    assert again.output_text == house.respond("And?", previous_response_id=first.id).output_text


def test_logprobs_are_told_where_they_are_asked_for(house: House) -> None:
    reply = house.respond("Hello.", include=["message.output_text.logprobs"], top_logprobs=2)
    entries = reply.output[0].content[0].logprobs
    assert len(entries) == 12
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    assert reply.output_text == house.respond("Hello.").output_text
    assert house.respond("Hello.").output[0].content[0].logprobs == []


def test_an_object_may_be_asked_for(house: House) -> None:
    closing = {str(ord(text)): 6 for text in '}"]'}
    reply = house.respond(
        "Say it.",
        max_output_tokens=300,
        text={"format": {"type": "json_object"}},
        extra_body={"logit_bias": closing},
        seed=3,
    )
    assert reply.status == "completed"
    assert isinstance(json.loads(reply.output_text), dict)
    assert reply.text.format.type == "json_object"


def test_input_is_counted_without_a_reply(house: House) -> None:
    first = house.respond("Good morning.", instructions="Be brief.")
    body = {"input": "Good morning.", "instructions": "Be brief."}
    count = house.api.responses.input_tokens.count(**body)
    assert count.input_tokens == first.usage.input_tokens
    later = house.api.responses.input_tokens.count(input="And?", previous_response_id=first.id)
    assert later.input_tokens == house.respond("And?", previous_response_id=first.id).usage.input_tokens


# --- the tree -------------------------------------------------------------------------------------------


def test_each_response_goes_on_from_the_one_it_names(house: House) -> None:
    replies = [house.respond("Good morning.")]
    assert cached(replies[0]) == 0
    for text in ("And then?", "Who says so?", "Why?"):
        replies.append(house.respond(text, previous_response_id=replies[-1].id))
        assert replies[-1].previous_response_id == replies[-2].id
        assert cached(replies[-1]) == replies[-2].usage.total_tokens - 1


def test_a_chain_says_what_a_chat_with_all_of_it_says(house: House) -> None:
    first = house.respond("Good morning.")
    second = house.respond("And then?", previous_response_id=first.id)
    messages = [user("Good morning."), assistant(first.output_text), user("And then?")]
    assert house.chat(messages).choices[0].message.content == second.output_text


def test_two_may_go_on_from_one_and_neither_knows_of_the_other(house: House) -> None:
    root = house.respond("Good morning.")
    left, right = (house.respond(text, previous_response_id=root.id) for text in ("Left?", "Right?"))
    assert cached(left) == cached(right) == root.usage.total_tokens - 1
    leaves = [house.respond("Where now?", previous_response_id=each.id) for each in (left, right, left)]
    assert leaves[0].output_text == leaves[2].output_text != leaves[1].output_text
    assert [cached(leaf) for leaf in leaves[:2]] == [each.usage.total_tokens - 1 for each in (left, right)]
    assert house.api.responses.retrieve(root.id) == root


def test_many_may_go_on_from_one_at_once(house: House) -> None:
    root = house.respond("Good morning.")
    with ThreadPoolExecutor(6) as pool:
        texts = [f"Number {number}?" for number in range(6)]
        replies = list(pool.map(lambda text: house.respond(text, previous_response_id=root.id), texts))
    assert all(cached(reply) == root.usage.total_tokens - 1 for reply in replies)
    for text, reply in zip(texts, replies, strict=True):
        assert house.respond(text, previous_response_id=root.id).output_text == reply.output_text


def test_instructions_are_of_one_response_alone(house: House) -> None:
    first = house.respond("Good morning.", instructions="Speak like a pirate.", extra_body=LETTERS)
    second = house.respond("And then?", previous_response_id=first.id)
    messages = [user("Good morning."), assistant(first.output_text), user("And then?")]
    without = house.chat(messages, extra_body={"cache_salt": "none of it"})
    assert second.usage.input_tokens == without.usage.prompt_tokens
    assert second.output_text == without.choices[0].message.content
    assert second.instructions is None
    third = house.respond("And then?", previous_response_id=first.id, instructions="Speak like a pirate.")
    assert cached(third) == first.usage.total_tokens - 1
    assert third.instructions == "Speak like a pirate."


def test_what_is_deleted_is_gone_and_what_goes_on_from_it_stays(house: House) -> None:
    first = house.respond("Good morning.")
    second = house.respond("And then?", previous_response_id=first.id)
    house.api.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        house.api.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        house.api.responses.delete(first.id)
    assert not_found(house, previous_response_id=first.id).param == "previous_response_id"
    third = house.respond("Why?", previous_response_id=second.id)
    assert cached(third) == second.usage.total_tokens - 1


def test_what_is_not_to_be_kept_is_not(house: House) -> None:
    before = house.backend.usage(house.tenant).total
    reply = house.respond("Good morning.", store=False)
    assert reply.store is False
    assert house.backend.usage(house.tenant).total == before
    with pytest.raises(openai.NotFoundError):
        house.api.responses.retrieve(reply.id)
    assert not_found(house, previous_response_id=reply.id).param == "previous_response_id"
    kept = house.respond("Good morning.")
    assert cached(kept) == 0
    aside = house.respond("And then?", previous_response_id=kept.id, store=False)
    assert cached(aside) == kept.usage.total_tokens - 1


@pytest.mark.parametrize(
    "name",
    [
        *(
            MISSING,
            MISSING.lower(),
            "resp_",
            "resp_x",
            "01ARZ3NDEKTSV4RRFFQ69G5FAV",
            "conv_01ARZ3NDEKTSV4RRFFQ69G5FAV",
        ),
        *(
            "../../etc/passwd",
            "resp_../../etc/passwd",
            "resp_01ARZ3NDEKTSV4RRFFQ69G5FA\0",
            "a" * 10_000,
            "",
            "résp_ü",
        ),
    ],
)
def test_an_id_that_is_nobodys_is_not_found(house: House, name: str) -> None:
    error = not_found(house, previous_response_id=name)
    assert (error.code, error.param) == ("session_not_found", "previous_response_id")


@pytest.mark.parametrize("name", [MISSING, "resp_x", "..%2f..%2fetc%2fpasswd", "a" * 100, "%00"])
def test_a_path_that_leads_nowhere_is_not_found(house: House, name: str) -> None:
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
        assert house.ask(method, f"/v1/responses/{name}{path}").status_code == 404


def test_a_session_that_is_no_response_is_none(house: House) -> None:
    session = house.backend.create(house.tenant)
    conversation = house.api.conversations.create()
    for name in (session.id, conversation.id.removeprefix("conv_")):
        assert not_found(house, previous_response_id=f"resp_{name}").code == "session_not_found"
        assert house.ask("DELETE", f"/v1/responses/resp_{name}").status_code == 404


def test_another_tenants_responses_are_not_there(house: House) -> None:
    reply = house.respond("Good morning.")
    other = house.of(f"{house.tenant}-other")
    with pytest.raises(openai.NotFoundError):
        other.api.responses.retrieve(reply.id)
    assert not_found(other, previous_response_id=reply.id).param == "previous_response_id"
    assert cached(other.respond("Good morning.")) == 0
    assert house.api.responses.retrieve(reply.id) == reply


# --- workers and restarts -------------------------------------------------------------------------------


def test_a_restart_between_responses_changes_nothing_but_the_time(up: Up) -> None:
    texts = ("Good morning.", "And then?", "Who says so?")

    def chain(house: House, before: list[Any], salt: str) -> Any:
        more = {"previous_response_id": before[-1].id} if before else {}
        return house.respond(texts[len(before)], **more, extra_body={"cache_salt": salt})

    unbroken: list[Any] = []
    with up() as house:
        for _ in texts:
            unbroken.append(chain(house, unbroken, "unbroken"))
    broken: list[Any] = []
    for _ in texts:
        with up() as house:
            broken.append(chain(house, broken, "broken"))
    with up() as house:
        for reply in (*unbroken, *broken):
            assert house.api.responses.retrieve(reply.id) == reply
    assert [reply.output_text for reply in broken] == [reply.output_text for reply in unbroken]
    assert [cached(reply) for reply in broken] == [cached(reply) for reply in unbroken]


def test_any_worker_can_take_any_response(up: Up) -> None:
    with up() as one, up() as two:
        last = one.respond("Good morning.")
        for turn in range(4):
            worker = two if turn % 2 == 0 else one
            reply = worker.respond(f"Turn {turn}?", previous_response_id=last.id)
            assert cached(reply) == last.usage.total_tokens - 1
            last = reply
        assert one.api.responses.retrieve(last.id) == two.api.responses.retrieve(last.id) == last


# --- what was given -------------------------------------------------------------------------------------


def test_the_input_of_a_response_is_listed_without_what_came_before(house: House) -> None:
    first = house.respond("Good morning.", instructions="Be brief.")
    given = [user(f"Number {number}.") for number in range(5)]
    second = house.respond(given, previous_response_id=first.id)
    items = house.api.responses.input_items.list(second.id, order="asc")
    assert [item.content[0].text for item in items] == [each["content"] for each in given]
    (only,) = house.api.responses.input_items.list(first.id)
    assert (only.role, only.content[0].text) == ("user", "Good morning.")


def test_lists_are_told_page_by_page_in_both_orders(house: House) -> None:
    reply = house.respond([user(f"Number {number}.") for number in range(5)])
    up_ = list(house.api.responses.input_items.list(reply.id, order="asc", limit=2))
    down = list(house.api.responses.input_items.list(reply.id, order="desc", limit=2))
    assert [item.id for item in up_] == [item.id for item in reversed(down)]
    assert len({item.id for item in up_}) == 5
    page = house.api.responses.input_items.list(reply.id, order="asc", limit=2, after=up_[1].id)
    assert [item.id for item in page.data] == [up_[2].id, up_[3].id]
    assert page.has_more
    answer = house.ask("GET", f"/v1/responses/{reply.id}/input_items?after=msg_nobody")
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "after")
