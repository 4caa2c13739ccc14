"""What tests say in chats, and what they hear."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.sessions.service.openai.conftest import House, assistant, user

TALK = ("Good morning.", "And then?", "Who says so?")
#: Ids of the tiny vocabulary: a byte's token is the byte, and the last one ends a reply.
A, B, END = ord("A"), ord("B"), 259


def talk(house: House, turns: tuple[str, ...] = TALK, **more: Any) -> list[Any]:
    """Say one after the other, as clients do: with all that was said sent again."""
    messages, replies = [], []
    for text in turns:
        messages.append(user(text))
        replies.append(house.chat(messages, **more))
        messages.append(assistant(said(replies[-1])))
    return replies


def said(reply: Any) -> str:
    return str(reply.choices[0].message.content)


def salted(salt: str) -> dict[str, Any]:
    return {"extra_body": {"cache_salt": salt}}


def streamed(house: House, messages: list[dict[str, Any]] | str, **more: Any) -> list[Any]:
    return list(house.chat(messages, stream=True, **more))


def choices(chunks: list[Any], index: int = 0) -> list[Any]:
    return [choice for chunk in chunks for choice in chunk.choices if choice.index == index]


def joined(chunks: list[Any], index: int = 0) -> str:
    return "".join(choice.delta.content or "" for choice in choices(chunks, index))


def refused(house: House, **more: Any) -> openai.BadRequestError:
    with pytest.raises(openai.BadRequestError) as caught:
        house.chat(more.pop("messages", "Hello."), **more)
    return caught.value
