"""One text read in pieces, alone or beside other sequences: what is said after each token, and what stays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from engine.passes import compute
from engine.runner import Engine
from engine.state import SeqId, parts_of
from tests.exact.running import forget

#: logits after every token, then the bytes of every part
Bits = tuple[torch.Tensor, ...]
#: (ids, how many of them go into a batch) of a sequence beside another
Beside = Mapping[SeqId, tuple[Sequence[int], int]]


@contextmanager
def sequence(engine: Engine) -> Iterator[SeqId]:
    """One that leaves nothing in memory."""
    seq = engine.create()
    yield seq
    forget(engine, seq)


def advance(engine: Engine, work: Mapping[SeqId, Sequence[int]]) -> dict[SeqId, torch.Tensor]:
    """Append to sequences in one batch, and say the logits after every token of each."""
    batch = {seq: (engine.length(seq), ids) for seq, ids in work.items() if ids}
    found = compute(engine._model, engine._memory, engine._slots, batch, every=tuple(batch))
    for seq, (_, ids) in batch.items():
        engine._slots[seq].append(ids)
    return found.logits


def read(engine: Engine, ids: Sequence[int], counts: Sequence[int], beside: Beside | None = None) -> Bits:
    """Of `ids` in pieces of `counts`, each in a batch with the next of those `beside` it."""
    assert sum(counts) == len(ids)
    with sequence(engine) as seq:
        logits, at = [], 0
        for count in filter(None, counts):
            work: dict[SeqId, Sequence[int]] = {}
            for other, (theirs, step) in (beside or {}).items():
                start = engine.length(other)
                work[other] = theirs[start : start + step]
            work[seq] = ids[at : at + count]
            logits.append(advance(engine, work)[seq])
            at += count
        return (torch.cat(logits), *state_of(engine, seq))


def state_of(engine: Engine, seq: SeqId) -> Bits:
    """The bytes of all that is needed to go on: window rows go back as far as the window alone."""
    rows, points = engine._memory.snapshot(seq)
    found = []
    for kind in dict.fromkeys(run.kind for run in rows):
        parts = zip(*(run.parts for run in rows if run.kind is kind), strict=True)
        for spec, pieces in zip(parts_of(engine.layout, kind), parts, strict=True):
            last = slice(None) if spec.window is None else slice(-spec.window, None)
            found.append(torch.cat(pieces)[last])
    return (*found, *(points[-1].parts if points else ()))


def differing(mine: Bits, other: Bits) -> list[int]:
    """Which of the tensors differ in a bit, the first of them the logits."""
    return [index for index, (a, b) in enumerate(zip(mine, other, strict=True)) if not torch.equal(a, b)]
