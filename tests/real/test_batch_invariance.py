"""Real models in the deterministic mode: how a prompt is cut, and what is read beside it, moves no bit."""

from __future__ import annotations

import pytest

from engine.config import EngineConfig
from engine.loader import load_engine
from tests.exact.pieces import differing, read, sequence
from tests.text import long_text

pytestmark = pytest.mark.real

LENGTH = 300
MIXED = (1, 2, 7, 64, 100, 3, 123)


@pytest.mark.parametrize(
    ("model", "dtype", "threads"),
    [
        ("smollm2", "f32", 1),
        ("smollm2", "bf16", 1),
        pytest.param("smollm2", "f32", 3, marks=pytest.mark.slow),
        pytest.param("smollm2", "bf16", 2, marks=pytest.mark.slow),
        pytest.param("gemma3", "f32", 2, marks=pytest.mark.slow),
        pytest.param("gemma3", "bf16", 1, marks=pytest.mark.slow),
    ],
)
def test_a_prompt_in_one_piece_is_a_prompt_token_by_token(
    model: str, dtype: str, threads: int, request: pytest.FixtureRequest
) -> None:
    config = EngineConfig(n_ctx=1024, num_cells=4096, dtype=dtype, threads=threads, deterministic=True)
    engine = load_engine(request.getfixturevalue(f"{model}_path"), config)
    ids = engine.tokenizer.encode(long_text())[: 2 * LENGTH]
    alone = read(engine, ids[:LENGTH], (1,) * LENGTH)
    assert differing(read(engine, ids[:LENGTH], (LENGTH,)), alone) == []
    with sequence(engine) as other:
        assert differing(read(engine, ids[:LENGTH], MIXED, {other: (ids[LENGTH:], 40)}), alone) == []


def test_in_the_ordinary_mode_it_is_not_to_the_bit(request: pytest.FixtureRequest) -> None:
    engine = load_engine(request.getfixturevalue("smollm2_path"), EngineConfig(n_ctx=1024, threads=1))
    ids = engine.tokenizer.encode(long_text())[:60]
    assert differing(read(engine, ids, (60,)), read(engine, ids, (1,) * 60)) != []
