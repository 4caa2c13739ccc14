"""Sequences cut, moved and forked: memory, record and draft together."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core import Core
from engine.errors import ContextFull, EditRefused
from engine.passes import compute
from engine.state import Pending, SeqId


def fork(core: Core, seq: SeqId) -> SeqId:
    """See `Engine.fork`."""
    record = core.record(seq)
    copy = core.slots.open(record.sampler, record.scope)
    try:
        core.memory.copy(seq, copy)
    except BaseException:
        core.slots.discard(copy)
        raise
    core.slots.replace(copy, record.fork())
    if core.drafter is not None:
        core.drafter.copy(seq, copy, len(record.tokens))
    return copy


def rewind(core: Core, seq: SeqId, length: int) -> None:
    """See `Engine.rewind`."""
    record = core.record(seq)
    if length == len(record.tokens):
        return
    if not 0 <= length < len(record.tokens):
        raise EditRefused(f"sequence {seq} has {len(record.tokens):,} tokens, and no state at {length:,}")
    core.memory.remove(seq, length, None)
    record.cut(length)
    if core.drafter is not None:
        core.drafter.cut(seq, length)


def go_back(core: Core, seq: SeqId, length: int) -> int:
    """As `rewind`, but where memory cannot, what follows the last place that it can go back to is read
    again. Returns how many tokens that were. After an error of that the sequence is shorter."""
    record = core.record(seq)
    followed = record.tokens[length:][:1]
    again = take_back(core, seq, length)
    if again:
        read_again(core, seq, again)
        record.edge = Pending(*followed)
    return len(again)


def take_back(core: Core, seq: SeqId, length: int) -> list[int]:
    """Cut to the last place up to `length` that memory can go back to. Returns what has to be read again."""
    tokens = core.record(seq).tokens
    at = length if length == len(tokens) else core.memory.last_resumable(seq, length)
    again = tokens[at:length]
    rewind(core, seq, at)
    return again


def read_again(core: Core, seq: SeqId, tokens: Sequence[int]) -> None:
    """Append tokens that a rewind took too many of. Leaves NextLogits as the edge, if there are any."""
    record, begin = core.record(seq), core.length(seq)
    while (done := core.length(seq) - begin) < len(tokens):
        part = tokens[done:][: core.stride(seq)]
        work = {seq: (begin + done, part)}
        found = compute(core.model, core.memory, core.slots, work, (), core.trunk)
        record.append(part)
        record.follow(found.logits[seq])
        if core.drafter is not None:
            core.drafter.observe(seq, begin + done, part, found.hidden.get(seq))


def shift(core: Core, seq: SeqId, n_keep: int, n_discard: int = 0) -> int:
    """See `Engine.shift`."""
    refusal = core.memory.refuse_shift()
    if refusal is not None:
        raise EditRefused(f"{core.name} cannot shift its context: {refusal}")
    if n_keep < 0 or n_discard < 0:
        raise EditRefused(f"a shift by {n_discard} after {n_keep}: neither can be negative")
    record = core.record(seq)
    n_keep = min(n_keep, len(record.tokens))
    left = len(record.tokens) - n_keep
    count = max(0, min(n_discard or left // 2, left - 1))
    if count:
        core.slots.with_room(lambda: core.memory.discard(seq, n_keep, n_keep + count))
        record.drop(n_keep, n_keep + count)
        if core.drafter is not None:
            core.drafter.cut(seq, n_keep)
    return count


def make_room(core: Core, seq: SeqId, count: int) -> None:
    """Shift the context, by choice, until `count` more tokens fit. Raises ContextFull, NoSlot."""
    config = core.config
    while core.length(seq) + count > config.n_ctx:
        try:
            shifted = shift(core, seq, config.n_keep, config.n_discard)
        except EditRefused as error:
            raise ContextFull(f"the context of {config.n_ctx:,} tokens is full: {error}") from error
        if not shifted:
            raise ContextFull(f"the context of {config.n_ctx:,} tokens cannot be shifted any further")
