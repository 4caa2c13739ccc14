"""Responses and conversations of several salts: each goes on from what was said, and hits what was said with
its own salt alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sessions.service.openai.conftest import LETTERS, House, Up, cached, user

LONG = "Once upon a time there was a secret, and whoever knows how it begins may look for it. " * 4


def salted(salt: str | None, **more: Any) -> dict[str, Any]:
    return {"extra_body": {**({} if salt is None else {"cache_salt": salt}), **LETTERS}, **more}


def chats_hit(house: House) -> dict[str | None, bool]:
    """By salt whether a stateless call with the same words finds them. Keeps nothing."""
    messages = [user(LONG)]
    return {salt: cached(house.chat(messages, store=False, **salted(salt))) > 0 for salt in ("a", "b", None)}


def test_a_response_is_gone_on_from_with_another_salt_by_its_words_alone(up: Up) -> None:
    with up() as house:
        root = house.respond(LONG, **salted("a"))
        same = house.respond("And then?", previous_response_id=root.id, **salted("a"))
        assert cached(same) == root.usage.total_tokens - 1
    with up() as house:
        assert chats_hit(house) == {"a": True, "b": False, None: False}
        for salt in ("b", None):
            other = house.respond("And then?", previous_response_id=root.id, **salted(salt))
            assert (other.output_text, cached(other)) == (same.output_text, 0)
            assert other.previous_response_id == root.id
            leaf = house.respond("So?", previous_response_id=other.id, **salted(salt))
            assert cached(leaf) == other.usage.total_tokens - 1
        assert cached(house.respond("Go on.", previous_response_id=root.id, **salted("a"))) > 255
    with up() as house:  # now each has said it
        assert chats_hit(house) == {"a": True, "b": True, None: True}
        assert cached(house.of("eve").chat([user(LONG)], **salted("a"))) == 0


def test_a_conversation_goes_on_whatever_salts_its_turns_have(up: Up) -> None:
    turns = [(LONG, "a"), ("And then?", "a"), ("Why?", None), ("Really?", None), ("So?", "a")]
    with up() as house:
        plain = house.api.conversations.create().id
        expected = [house.respond(text, conversation=plain, **salted("plain")) for text, _ in turns]
        mixed = house.api.conversations.create().id
    replies = []
    for text, salt in turns:
        with up() as house:
            replies.append(house.respond(text, conversation=mixed, **salted(salt)))
    assert [reply.output_text for reply in replies] == [reply.output_text for reply in expected]
    first, second, other, again, back = replies
    assert cached(second) == first.usage.total_tokens - 1
    assert cached(other) == 0
    assert cached(again) == other.usage.total_tokens - 1
    assert cached(back) < other.usage.input_tokens  # no more than was said with it before


@pytest.mark.parametrize("first", ["a", None])
def test_a_response_that_was_talked_in_as_a_session_with_another_salt_shares_no_more(
    up: Up, first: str | None
) -> None:
    with up() as house:
        root = house.respond(LONG, **salted(first))
        session = root.id.removeprefix("resp_")
        body = {
            "messages": [user("And then?")],
            "max_tokens": 4,
            "cache_salt": "b",
        }
        assert house.post(f"/v1/sessions/{session}/messages", body).status_code == 200
    with up() as house:
        assert chats_hit(house) == {"a": False, "b": False, None: False}
        later = house.respond("So?", previous_response_id=root.id, **salted(first))
        assert cached(later) == 0
        assert house.api.responses.retrieve(root.id).output_text == root.output_text
