"""In the deterministic mode the bits of a row depend on nothing that shares its batch: a prompt in one piece,
in any pieces, token by token and beside other sequences leaves the same state and says the same, for every
architecture.

The whole grid of dtypes is `make test-all`.
"""

from __future__ import annotations

import itertools
from typing import cast

import pytest
import torch

from engine.models.base import Trunk
from engine.passes import compute
from engine.runner import Engine
from tests.engine.parallel.threads import divided
from tests.exact.members import MEMBERS, OTHERS, folder
from tests.exact.pieces import advance, differing, read, sequence, state_of
from tests.oracles import base

LENGTH = 48
IDS = base.tokens(11, LENGTH)
OTHER, ANOTHER = base.tokens(12, 90), base.tokens(13, 90)
ONE_BY_ONE, WHOLE, IRREGULAR = (1,) * LENGTH, (LENGTH,), (5, 1, 13, 2, 17, 10)


def grid() -> list[object]:
    """(family, computed in, dtype of rows)"""
    gate = {(family, "f32", "q8_0") for family in (*MEMBERS, *OTHERS)}
    gate |= {(family, dtype, dtype) for family in MEMBERS for dtype in ("f32", "bf16")}
    whole = itertools.product((*MEMBERS, *OTHERS), ("f32", "bf16"), ("f32", "bf16", "q8_0", "q4_0"))
    return [pytest.param(*one, marks=() if one in gate else pytest.mark.slow) for one in whole]


def open_member(family: str, dtype: str, rows: str, **settings: object) -> Engine:
    return base.open_engine(folder(family), dtype=dtype, type_k=rows, type_v=rows, **settings)


@pytest.mark.parametrize(("family", "dtype", "rows"), grid())
def test_what_shares_a_batch_moves_no_bit(family: str, dtype: str, rows: str) -> None:
    engine = open_member(family, dtype, rows, deterministic=True)
    alone = read(engine, IDS, ONE_BY_ONE)
    assert len(alone) == 1 + len(engine.layout)
    assert differing(read(engine, IDS, WHOLE), alone) == []
    assert differing(read(engine, IDS, IRREGULAR), alone) == []
    with sequence(engine) as one, sequence(engine) as two:
        assert differing(read(engine, IDS, IRREGULAR, {one: (OTHER, 7), two: (ANOTHER, 10)}), alone) == []


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3", "gpt_oss", "mamba2", "qwen4_exp"])
def test_in_the_ordinary_mode_it_does(family: str) -> None:
    engine = open_member(family, "f32", "f32")
    assert differing(read(engine, IDS, WHOLE), read(engine, IDS, ONE_BY_ONE)) != []


@pytest.mark.parametrize("family", ["llama", "recurrent_gemma"])
def test_the_sizes_of_batches_and_passes_move_no_bit(family: str) -> None:
    alone = read(open_member(family, "f32", "bf16", deterministic=True), IDS, WHOLE)
    for sizes in ({"max_ubatch": 3}, {"max_batch": 50, "keep_tail": 5}):
        other = open_member(family, "f32", "bf16", deterministic=True, **sizes)
        assert differing(read(other, IDS, WHOLE), alone) == []


@pytest.mark.parametrize("family", ["llama", "deepseek_v32", "kimi_linear"])
def test_sequences_of_one_length_read_on_as_each_would_alone(family: str) -> None:
    """They have the same places, so that they cannot share a pass."""
    engine = open_member(family, "f32", "q8_0", deterministic=True)
    alone = read(engine, IDS, (40, 3, 5))
    with sequence(engine) as one, sequence(engine) as two, sequence(engine) as three:
        live = {one: IDS, two: OTHER, three: IDS}
        cuts = itertools.pairwise((0, 20, 40, 43, LENGTH))
        parts = [advance(engine, {seq: ids[start:stop] for seq, ids in live.items()}) for start, stop in cuts]
        for seq in (one, three):
            logits = torch.cat([part[seq] for part in parts])
            assert differing((logits, *state_of(engine, seq)), alone) == []


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_asking_for_hidden_states_moves_no_bit(family: str) -> None:
    engine = open_member(family, "f32", "f32", deterministic=True)
    with sequence(engine) as one, sequence(engine) as two:
        parts = [
            compute(engine._model, engine._memory, engine._slots, {seq: (0, IDS)}, (seq,), trunk)
            for seq, trunk in ((one, None), (two, cast(Trunk, engine._model)))
        ]
        assert torch.equal(parts[0].logits[one], parts[1].logits[two])
        assert len(parts[1].hidden[two]) == LENGTH
        for seq in (one, two):
            engine._slots[seq].append(IDS)


@pytest.mark.parametrize("family", ["deepseek_v3", "kimi_linear"])
def test_a_model_that_is_divided_among_ranks_obeys_too(family: str) -> None:
    with divided(folder(family), 3, type_k="q8_0", type_v="q8_0", deterministic=True) as engine:
        assert differing(read(engine, IDS, IRREGULAR), read(engine, IDS, ONE_BY_ONE)) == []
