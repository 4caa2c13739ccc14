"""SmolLM2 divided among ranks: 3 KV heads, so that of two ranks one has two, and of four one has none.

Drift is stated as a share of the largest logit, about three times what was measured. It is what another cut
of the prompt into batches does to the logits of one rank (docs/parallel.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.loader import load_engine
from engine.runner import Engine
from tests.engine.parallel.comparing import drift, logits_after, same_bytes, told
from tests.text import long_text

pytestmark = pytest.mark.real

PROMPT, STEPS = 300, 24
#: by what is computed in and the dtype of rows
DRIFT = {("f32", "f32"): 1e-5, ("f32", "q8_0"): 0.03, ("bf16", "bf16"): 0.05, ("bf16", "q4_0"): 0.35}


@contextmanager
def opened(path: Path, size: int, dtype: str, rows: str) -> Iterator[Engine]:
    config = EngineConfig(
        n_ctx=1024, num_cells=2048, num_seqs=2, dtype=dtype, type_k=rows, type_v=rows, threads=1, tp=size
    )
    engine = load_engine(path, config)
    try:
        yield engine
    finally:
        engine.end()


@pytest.mark.parametrize(
    ("dtype", "rows", "resumed_at"),
    [
        ("f32", "f32", (4,)),
        pytest.param("f32", "q8_0", (1, 3, 4), marks=pytest.mark.slow),
        pytest.param("bf16", "bf16", (1, 3), marks=pytest.mark.slow),
        pytest.param("bf16", "q4_0", (1, 4), marks=pytest.mark.slow),
    ],
)
def test_two_ranks_say_what_one_says_and_others_go_on(
    dtype: str, rows: str, resumed_at: tuple[int, ...], smollm2_path: Path
) -> None:
    limit = DRIFT[dtype, rows]
    with opened(smollm2_path, 1, dtype, rows) as engine:
        ids = engine.tokenizer.encode(long_text())[: PROMPT + STEPS]
        seq = engine.create()
        engine.feed(seq, ids[:PROMPT])
        alone = torch.stack([logits_after(engine, seq), *told(engine, seq, ids[PROMPT:])])
    with opened(smollm2_path, 2, dtype, rows) as engine:
        seq = engine.create()
        engine.feed(seq, ids[:PROMPT])
        first, state = logits_after(engine, seq), engine.snapshot(seq)
        together = torch.stack([first, *told(engine, seq, ids[PROMPT:])])
        again = engine.restore(state)
        assert torch.equal(torch.stack(told(engine, again, ids[PROMPT:])), together[1:])
    check(together, alone, limit)
    for size in resumed_at:
        with opened(smollm2_path, size, dtype, rows) as engine:
            seq = engine.restore(state)
            assert same_bytes(engine.snapshot(seq), state)
            check(torch.stack(told(engine, seq, ids[PROMPT:])), together[1:], limit)


def check(mine: torch.Tensor, theirs: torch.Tensor, limit: float) -> None:
    """Within the drift, and of one mind wherever the likeliest token leads by more than that."""
    assert drift(mine, theirs) <= limit
    top = theirs.topk(2, -1).values
    clear = top[:, 0] - top[:, 1] > 2 * limit * theirs.abs().max()
    assert torch.equal(mine.argmax(-1)[clear], theirs.argmax(-1)[clear])
