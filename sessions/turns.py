"""Turns: where in a conversation's messages the user began to speak, and which ids belong to each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.errors import UsageError
from serialization.manifest import Message

#: The role of a session's first message where its ids are a text that no chat template laid out: what is said
#: after it follows it.
TEXT = "text"

#: A session is titled by so many characters of what was said first.
_TITLE_LENGTH = 60


def title_of(text: str) -> str:
    """What a session that begins with `text` is called."""
    return " ".join(text.split())[:_TITLE_LENGTH]


def title_of_all(messages: Sequence[Message]) -> str:
    """The same by what the user said first; empty before that."""
    return title_of(next((message.text for message in messages if message.role == "user"), ""))


def after_text(messages: Sequence[Message]) -> tuple[Message | None, Sequence[Message]]:
    """The text that the conversation begins with, if it does, and what was said after it."""
    if messages and messages[0].role == TEXT:
        return messages[0], messages[1:]
    return None, messages


def first_of(messages: Sequence[Message], turns: int) -> int:
    """The index of the message that opens the last `turns` turns. Raises UsageError if there are fewer."""
    begun = [i for i, message in enumerate(messages) if message.role == "user"]
    if not 1 <= turns <= len(begun):
        raise UsageError(f"cannot take back {turns} turns of {len(begun)}")
    return begun[-turns]


def moved(messages: Sequence[Message], dropped: int) -> list[Message]:
    """The same messages where the first `dropped` ids are gone."""
    return [
        replace(message, start=max(0, message.start - dropped), stop=max(0, message.stop - dropped))
        for message in messages
    ]


def clipped(messages: Sequence[Message], length: int) -> list[Message]:
    """The same messages, none of which reaches beyond `length` ids. Where the text behind them is read again
    its place is not known to the token, so messages there begin and end where the ids were cut: a rewind to
    one of them goes back that far, and reads on from there."""
    return [
        replace(message, start=min(message.start, length), stop=min(message.stop, length))
        for message in messages
    ]
