"""Real models in the deterministic mode: how a prompt is cut, and what is read beside it, moves no bit."""

from __future__ import annotations

import pytest

from engine.config import EngineConfig
from engine.loader import load_engine
from tests.exact.pieces import differing, read, sequence
from tests.text import long_text

pytestmark = pytest.mark.real


@pytest.mark.parametrize(
    ("model", "dtype", "threads", "length"),
    [
        ("smollm2", "f32", 1, 300),
        ("smollm2", "bf16", 1, 300),
        pytest.param("smollm2", "f32", 3, 60, marks=pytest.mark.slow),
        pytest.param("smollm2", "bf16", 2, 60, marks=pytest.mark.slow),
        pytest.param("gemma3", "f32", 2, 60, marks=pytest.mark.slow),
        pytest.param("gemma3", "bf16", 1, 600, marks=pytest.mark.slow),
    ],
)
def test_a_prompt_in_one_piece_is_a_prompt_token_by_token(
    model: str, dtype: str, threads: int, length: int, request: pytest.FixtureRequest
) -> None:
    config = EngineConfig(n_ctx=1024, num_cells=4096, dtype=dtype, threads=threads, deterministic=True)
    engine = load_engine(request.getfixturevalue(f"{model}_path"), config)
    text = engine.tokenizer.encode(long_text())
    ids, others = text[:length], text[length : 2 * length]
    alone = read(engine, ids, (1,) * length)
    most = min(length, engine.config.max_batch)
    assert differing(read(engine, ids, (most, length - most)), alone) == []
    mixed = (1, 2, 7, length // 2, 3, length - length // 2 - 13)
    with sequence(engine) as other:
        assert differing(read(engine, ids, mixed, {other: (others, 40)}), alone) == []


def test_in_the_ordinary_mode_it_is_not_to_the_bit(request: pytest.FixtureRequest) -> None:
    engine = load_engine(request.getfixturevalue("smollm2_path"), EngineConfig(n_ctx=1024, threads=1))
    ids = engine.tokenizer.encode(long_text())[:60]
    assert differing(read(engine, ids, (60,)), read(engine, ids, (1,) * 60)) != []
