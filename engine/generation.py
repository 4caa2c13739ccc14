"""A reply, token by token, from an engine's steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from engine.chooser import Chooser, Choosing
from engine.errors import ContextFull
from engine.reply import Logprobs, Piece, Reply
from engine.state import Pending, SeqId

Cancel = Callable[[], bool]


class Saying(Choosing, Protocol):
    """What a reply asks of an engine."""

    def advance(self, work: Mapping[SeqId, Sequence[int]]) -> object: ...

    def say(self, seq: SeqId, at_most: int | None = None) -> int: ...


def generate(
    engine: Saying,
    seq: SeqId,
    max_tokens: int | None,
    stop: Sequence[str],
    cancel: Cancel | None,
    chooser: Chooser | None = None,
) -> Iterator[Piece]:
    """See `Engine.generate`."""
    reply = Reply(engine.tokenizer, tuple(stop), max_tokens)
    while (ended := reply.ended) is None:
        if cancel and cancel():
            ended = "cancelled"
            break
        try:
            token, told = _next(engine, seq, reply.left, chooser)
        except ContextFull:
            ended = "context"
            break
        yield reply.push(token, told)
    if reply.unsaid(ended):
        yield reply.end(ended)


def _next(
    engine: Saying, seq: SeqId, left: int | None, chooser: Chooser | None
) -> tuple[int, Logprobs | None]:
    """The token that follows, and what a chooser tells of it."""
    if chooser is None:
        return engine.say(seq, left), None
    edge = engine.edge(seq)
    if isinstance(edge, Pending):
        engine.advance({seq: (edge.token,)})
    return chooser.choose(engine, seq)
