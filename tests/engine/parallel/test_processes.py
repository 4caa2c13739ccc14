"""Ranks that are processes: what they compute together, and what they save for another number of them.

Drift is the largest difference of logits from those of one rank, as a share of the largest logit. A last bit
that is another is all that it takes for a value to be rounded to another step of a quantized row; the limits
are about three times what was measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.runner import Engine
from engine.state import SequenceState
from tests.engine.parallel.comparing import drift, logits_after, same_bytes, told
from tests.oracles import base

DRIFT = {"f32": 1e-5, "bf16": 3e-4, "q8_0": 2e-3, "q4_0": 2e-3}
PROMPT, MORE = base.tokens(count=70), base.tokens(seed=2, count=16)


@dataclass(frozen=True, slots=True)
class Case:
    """A model, the dtypes of its K and V, and how many ranks it is saved at and resumed at."""

    family: str
    type_k: str
    type_v: str
    saved_at: int
    resumed_at: tuple[int, ...]
    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def limit(self) -> float:
        return max(DRIFT[self.type_k], DRIFT[self.type_v])

    def __str__(self) -> str:
        return f"{self.family}-{self.type_k}-{self.type_v}"


#: Three KV heads: two ranks have 1 and 2, of four ranks one has none.
THREE = (("num_attention_heads", 6), ("num_key_value_heads", 3), ("hidden_size", 96))
#: Heads of 32 and 96 values: one block and three, an odd number of them in a row of three heads.
CASES = [
    Case("llama", "q8_0", "q4_0", 2, (1, 3, 4), (*THREE, ("head_dim", 32))),
    Case("deepseek_v32", "q8_0", "q8_0", 2, (1,)),
    Case("minimax_m3", "f32", "f32", 3, (1,), (*THREE, ("index_n_heads", 3))),
    Case("qwen3_next", "f32", "q8_0", 2, (1,), THREE),
]
SLOW = [
    Case("llama", "q4_0", "q8_0", 4, (1, 2, 3), (*THREE, ("head_dim", 96))),
    Case("llama", "bf16", "bf16", 3, (1, 2, 4), (*THREE, ("head_dim", 32))),
    Case("deepseek_v32", "q4_0", "q4_0", 3, (1, 2, 4)),
    Case("minimax_m3", "q8_0", "q4_0", 2, (1, 3, 4), (*THREE, ("index_n_heads", 3))),
    Case("qwen3_next", "q8_0", "q8_0", 3, (1, 2, 4), THREE),
    Case("falcon_h1", "q8_0", "q8_0", 2, (1, 3)),
    Case("gemma3", "q8_0", "q8_0", 2, (1, 3)),
    Case("deepseek_v4", "q8_0", "q8_0", 2, (1, 3)),
    Case("glm5_next", "f32", "f32", 2, (1, 3)),
    Case("qwen4_exp", "q8_0", "q8_0", 2, (1, 3)),
]


GRID = [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)]


@contextmanager
def opened(folder: Path, case: Case, size: int) -> Iterator[Engine]:
    engine = base.open_engine(folder, tp=size, type_k=case.type_k, type_v=case.type_v)
    try:
        yield engine
    finally:
        engine.end()


@dataclass(frozen=True, slots=True)
class Run:
    """Logits after the prompt and after each token behind it, and the state in between."""

    logits: torch.Tensor
    state: SequenceState


def run(engine: Engine) -> Run:
    seq = engine.create()
    engine.feed(seq, PROMPT)
    first, state = logits_after(engine, seq), engine.snapshot(seq)
    return Run(torch.stack([first, *told(engine, seq, MORE)]), state)


@pytest.mark.parametrize("case", GRID, ids=str)
def test_saved_by_some_ranks_and_resumed_by_others(case: Case, tmp_path: Path) -> None:
    base.write(case.family, tmp_path, **dict(case.changes))
    with opened(tmp_path, case, 1) as engine:
        alone = run(engine)
    with opened(tmp_path, case, case.saved_at) as engine:
        together = run(engine)
        # The same ranks, from the state: bit for bit.
        seq = engine.restore(together.state)
        assert same_bytes(engine.snapshot(seq), together.state)
        assert torch.equal(torch.stack(told(engine, seq, MORE)), together.logits[1:])
    assert together.state.fingerprint.making["tp"] == case.saved_at
    assert drift(together.logits, alone.logits) <= case.limit
    assert_same_choices(together.logits, alone.logits, case.limit)
    for size in case.resumed_at:
        with opened(tmp_path, case, size) as engine:
            seq = engine.restore(together.state)
            assert same_bytes(engine.snapshot(seq), together.state), "rows are restored byte for byte"
            logits = torch.stack(told(engine, seq, MORE))
        assert drift(logits, together.logits[1:]) <= case.limit
        assert_same_choices(logits, together.logits[1:], case.limit)


def assert_same_choices(mine: torch.Tensor, theirs: torch.Tensor, limit: float) -> None:
    """The likeliest token is the same wherever it leads by more than both can have drifted."""
    top = theirs.topk(2, -1).values
    clear = top[:, 0] - top[:, 1] > 2 * limit * theirs.abs().max()
    assert clear.any(), "no choice is clear"
    assert torch.equal(mine.argmax(-1)[clear], theirs.argmax(-1)[clear])


@pytest.mark.slow
def test_new_ranks_of_the_same_number_go_on_bit_for_bit(tmp_path: Path) -> None:
    """As after a restart: none of the processes is the same."""
    case = CASES[0]
    base.write(case.family, tmp_path, **dict(case.changes))
    with opened(tmp_path, case, 2) as engine:
        before = run(engine)
    with opened(tmp_path, case, 2) as engine:
        seq = engine.restore(before.state)
        assert torch.equal(torch.stack(told(engine, seq, MORE)), before.logits[1:])


def test_several_sequences_and_edits(tmp_path: Path) -> None:
    """Forks, shifts and rewinds go on as with one rank."""

    def story(engine: Engine) -> torch.Tensor:
        seq = engine.create()
        engine.feed(seq, PROMPT)
        fork = engine.fork(seq)
        engine.rewind(seq, 40)
        engine.shift(fork, 4, 20)
        out: list[torch.Tensor] = []
        for token in MORE:
            engine.advance({seq: (token,), fork: (token,)})
            out += [logits_after(engine, seq), logits_after(engine, fork)]
        return torch.stack(out)

    case = Case("llama", "f32", "f32", 2, (), (*THREE, ("head_dim", 32)))
    base.write(case.family, tmp_path, **dict(case.changes))
    with opened(tmp_path, case, 1) as engine:
        alone = story(engine)
    with opened(tmp_path, case, 2) as engine:
        together = story(engine)
    assert drift(together, alone) <= case.limit
