"""A reply, token by token, from an engine's steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from engine.errors import ContextFull
from engine.reply import Piece, Reply
from engine.state import SeqId
from engine.tokenizer import Tokenizer

Cancel = Callable[[], bool]


class Saying(Protocol):
    """What a reply asks of an engine."""

    tokenizer: Tokenizer

    def say(self, seq: SeqId, at_most: int | None = None) -> int: ...


def generate(
    engine: Saying, seq: SeqId, max_tokens: int | None, stop: Sequence[str], cancel: Cancel | None
) -> Iterator[Piece]:
    """See `Engine.generate`."""
    reply = Reply(engine.tokenizer, tuple(stop), max_tokens)
    while (ended := reply.ended) is None:
        if cancel and cancel():
            ended = "cancelled"
            break
        try:
            token = engine.say(seq, reply.left)
        except ContextFull:
            ended = "context"
            break
        yield reply.push(token)
    if reply.unsaid(ended):
        yield reply.end(ended)
