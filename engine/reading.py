"""Prompts read: what memory knows already is shared, and the rest computed batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.admission import check_ids, check_room
from engine.core import Core
from engine.edits import rewind
from engine.state import Edge, Pending, SeqId
from engine.stepping import advance


@dataclass(frozen=True, slots=True)
class FeedResult:
    """Of the tokens given, `shared` had rows in memory already and `computed` were read."""

    shared: int
    computed: int


def feed(
    core: Core,
    seq: SeqId,
    tokens: Sequence[int],
    progress: Callable[[int, int], None] | None,
    cancel: Callable[[], bool] | None,
) -> FeedResult:
    """See `Engine.feed`."""
    record, ids = core.record(seq), list(tokens)
    check_ids(ids, core.model.vocab_size)
    if not ids:
        return FeedResult(0, 0)
    check_room(core.config, core.memory.refuse_shift(), core.length(seq), len(ids))
    was_empty, edge = not record.tokens, record.edge
    shared = done = share(core, seq, ids)
    try:
        while done < len(ids) and not (cancel and cancel()):
            part = ids[done : done + core.stride(seq)]
            advance(core, {seq: part}, {})
            done += len(part)
            if progress:
                progress(done, len(ids))
    finally:
        if was_empty and done == shared:
            unshare(core, seq, edge)
            shared = done = 0
    return FeedResult(shared, done - shared)


def share(core: Core, seq: SeqId, tokens: Sequence[int]) -> int:
    """See `Engine.share`."""
    record = core.record(seq)
    found = None if record.tokens else core.slots.longest(tokens[:-1], record.scope)
    if found is None:
        return 0
    source, length = found
    core.memory.copy(source, seq, 0, length)
    if core.drafter is not None:
        core.drafter.copy(source, seq, length)
    record.append(tokens[:length])
    record.edge = Pending(tokens[length])
    return length


def unshare(core: Core, seq: SeqId, edge: Edge) -> None:
    """See `Engine.unshare`."""
    rewind(core, seq, 0)
    core.record(seq).edge = edge
