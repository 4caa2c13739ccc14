"""Turns: where in a conversation's messages the user began to speak."""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import UsageError
from serialization.manifest import Message


def first_of(messages: Sequence[Message], turns: int) -> int:
    """The index of the message that opens the last `turns` turns. Raises UsageError if there are fewer."""
    begun = [i for i, message in enumerate(messages) if message.role == "user"]
    if not 1 <= turns <= len(begun):
        raise UsageError(f"cannot take back {turns} turns of {len(begun)}")
    return begun[-turns]
