"""In the deterministic mode the bits of a row depend on nothing that shares its batch: a prompt in one piece,
in any pieces, token by token and beside other sequences leaves the same state and says the same, for every
architecture.

The whole grid of dtypes is `make test-all`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from engine.passes import compute
from engine.runner import Engine
from engine.state import SeqId, parts_of
from tests.exact.members import MEMBERS, OTHERS, folder
from tests.exact.running import forget
from tests.oracles import base

LENGTH = 48
IDS = base.tokens(11, LENGTH)
BESIDE = {7: base.tokens(12, 90), 10: base.tokens(13, 90)}
IRREGULAR = (5, 1, 13, 2, 17, 10)

Bits = tuple[torch.Tensor, ...]


def grid() -> list[object]:
    """(family, computed in, dtype of rows)"""
    gate = {(family, "f32", "q8_0") for family in (*MEMBERS, *OTHERS)}
    gate |= {(family, dtype, dtype) for family in MEMBERS for dtype in ("f32", "bf16")}
    whole = itertools.product((*MEMBERS, *OTHERS), ("f32", "bf16"), ("f32", "bf16", "q8_0", "q4_0"))
    return [pytest.param(*one, marks=() if one in gate else pytest.mark.slow) for one in whole]


def open_member(family: str, dtype: str, rows: str, **settings: object) -> Engine:
    return base.open_engine(folder(family), dtype=dtype, type_k=rows, type_v=rows, **settings)


@contextmanager
def sequence(engine: Engine) -> Iterator[SeqId]:
    seq = engine.create()
    yield seq
    forget(engine, seq)


def advance(engine: Engine, work: dict[SeqId, Sequence[int]]) -> dict[SeqId, torch.Tensor]:
    """Append to sequences in one batch, and say the logits after every token of each."""
    batch = {seq: (engine.length(seq), ids) for seq, ids in work.items()}
    found = compute(engine._model, engine._memory, engine._slots, batch, every=tuple(work))
    for seq, ids in work.items():
        engine._slots[seq].append(ids)
    return found.logits


def in_pieces(engine: Engine, counts: Sequence[int], beside: Sequence[SeqId] = ()) -> Bits:
    """Logits after every token of IDS, read in pieces of `counts`, and what is remembered in the end. Those
    `beside` it read some of theirs in every batch."""
    with sequence(engine) as seq:
        logits, at = [], 0
        for count in counts:
            work: dict[SeqId, Sequence[int]] = {}
            for (step, ids), other in zip(BESIDE.items(), beside, strict=False):
                start = engine.length(other)
                work[other] = ids[start : start + step]
            work[seq] = IDS[at : at + count]
            logits.append(advance(engine, work)[seq])
            at += count
        assert at == LENGTH
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


@pytest.mark.parametrize(("family", "dtype", "rows"), grid())
def test_what_shares_a_batch_moves_no_bit(family: str, dtype: str, rows: str) -> None:
    engine = open_member(family, dtype, rows, deterministic=True)
    alone = in_pieces(engine, (1,) * LENGTH)
    assert len(alone) == 1 + len(engine.layout)
    assert differing(in_pieces(engine, (LENGTH,)), alone) == []
    assert differing(in_pieces(engine, IRREGULAR), alone) == []
    with sequence(engine) as one, sequence(engine) as two:
        assert differing(in_pieces(engine, IRREGULAR, (one, two)), alone) == []


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3", "gpt_oss", "mamba2", "qwen4_exp"])
def test_in_the_ordinary_mode_it_does(family: str) -> None:
    engine = open_member(family, "f32", "f32")
    assert differing(in_pieces(engine, (LENGTH,)), in_pieces(engine, (1,) * LENGTH)) != []


@pytest.mark.parametrize("family", ["llama", "recurrent_gemma"])
def test_the_sizes_of_batches_and_passes_move_no_bit(family: str) -> None:
    alone = in_pieces(open_member(family, "f32", "bf16", deterministic=True), (LENGTH,))
    for sizes in ({"max_ubatch": 3}, {"max_batch": 50, "keep_tail": 5}):
        other = open_member(family, "f32", "bf16", deterministic=True, **sizes)
        assert differing(in_pieces(other, (LENGTH,)), alone) == []


@pytest.mark.parametrize("family", ["llama", "deepseek_v32", "kimi_linear"])
def test_sequences_of_one_length_decode_as_each_would_alone(family: str) -> None:
    """They have the same places, so that they cannot share a pass."""
    engine = open_member(family, "f32", "q8_0", deterministic=True)
    alone = in_pieces(engine, (40, 3, 5))
    with sequence(engine) as one, sequence(engine) as two, sequence(engine) as three:
        live = {one: IDS, two: base.tokens(14, LENGTH), three: IDS}
        parts = [
            advance(engine, {seq: ids[at:stop] for seq, ids in live.items()})
            for at, stop in ((0, 20), (20, 40), (40, 43), (43, LENGTH))
        ]
        for seq in (one, three):
            logits = torch.cat([part[seq] for part in parts])
            assert differing((logits, *state_of(engine, seq)), alone) == []
