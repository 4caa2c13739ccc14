"""A reply, token by token, from an engine's steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from engine.errors import ContextFull
from engine.reply import Piece, Reply
from engine.state import SeqId
from engine.tokenizer import Tokenizer

Cancel = Callable[[], bool]


class Stepping(Protocol):
    """What a reply asks of an engine."""

    tokenizer: Tokenizer

    def step(self, seq: SeqId, at_most: int | None = None) -> tuple[int, ...]: ...

    def unsay(self, seq: SeqId, count: int) -> None: ...


def generate(
    engine: Stepping, seq: SeqId, max_tokens: int | None, stop: Sequence[str], cancel: Cancel | None
) -> Iterator[Piece]:
    """See `Engine.generate`."""
    reply = Reply(engine.tokenizer, tuple(stop), max_tokens)
    while (ended := reply.ended) is None:
        if cancel and cancel():
            ended = "cancelled"
            break
        try:
            tokens = engine.step(seq, reply.left)
        except ContextFull:
            ended = "context"
            break
        said = 0
        try:
            for token in tokens:
                piece = reply.push(token)
                said += 1
                yield piece
                if piece.finish is not None:
                    break
        finally:  # also when the reader closes early: what it was not told was not said
            engine.unsay(seq, len(tokens) - said)
    if reply.unsaid(ended):
        yield reply.end(ended)
