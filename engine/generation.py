"""A reply, token by token, from an engine's steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from engine.chooser import Chooser, Choosing
from engine.errors import ContextFull
from engine.reply import Logprobs, Piece, Reply
from engine.state import Pending, SeqId

Cancel = Callable[[], bool]


class Stepping(Choosing, Protocol):
    """What a reply asks of an engine."""

    def advance(self, work: Mapping[SeqId, Sequence[int]]) -> object: ...

    def step(self, seq: SeqId, at_most: int | None = None) -> tuple[int, ...]: ...

    def unsay(self, seq: SeqId, count: int) -> None: ...


def generate(
    engine: Stepping,
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
            tokens, told = _step(engine, seq, reply.left, chooser)
        except ContextFull:
            ended = "context"
            break
        said = 0
        try:
            for token in tokens:
                piece = reply.push(token, told)
                said += 1
                yield piece
                if piece.finish is not None:
                    break
        finally:  # also when the reader closes early: what it was not told was not said
            engine.unsay(seq, len(tokens) - said)
    if reply.unsaid(ended):
        yield reply.end(ended)


def _step(
    engine: Stepping, seq: SeqId, left: int | None, chooser: Chooser | None
) -> tuple[tuple[int, ...], Logprobs | None]:
    """The tokens that follow; one alone where a chooser chooses it, and what it tells of it."""
    if chooser is None:
        return engine.step(seq, left), None
    edge = engine.edge(seq)
    if isinstance(edge, Pending):
        engine.advance({seq: (edge.token,)})
    token, told = chooser.choose(engine, seq)
    return (token,), told
