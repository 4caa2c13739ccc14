"""A conversation resumed in a new process goes on bit for bit as if it had never stopped.

Every save is live in one process, and resumed in another from disk or Redis: the next steps' logits
are compared by digest, all sequences decoded together in both. `make test` runs a subset of the cache
dtypes; the others are marked `slow` and part of `make test-all`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.loader import load_engine
from sessions.manager import SessionManager
from sessions.stores.open import open_store
from tests.redis_server import RedisServer
from tests.resuming import go_on, in_another_process, save_scenario
from tests.text import long_text

pytestmark = pytest.mark.real

STEPS = 64
#: 700 is past Gemma's window of 512, so that its first rows are out of reach
CUTS = (1, 255, 256, 257, 700)
GATE = [("smollm2", "bf16"), ("smollm2", "q8_0"), ("gemma3", "bf16"), ("gemma3", "q4_0")]
GRID = [
    pytest.param(model, dtype, marks=() if (model, dtype) in GATE else pytest.mark.slow)
    for model in ("smollm2", "gemma3")
    for dtype in ("f32", "f16", "bf16", "q8_0", "q5_0", "q4_0")
]


def settings(dtype: str) -> dict[str, object]:
    return {"n_ctx": 1024, "num_cells": 4096, "num_seqs": 12, "type_k": dtype, "type_v": dtype, "threads": 1}


def check(model: Path, dtype: str, store: str) -> None:
    engine = load_engine(model, EngineConfig.from_mapping(settings(dtype)))
    manager = SessionManager(open_store(store), engine)
    saved = save_scenario(manager, engine.tokenizer.encode(long_text()), CUTS)
    live = go_on(engine, [each.seq for each in saved], STEPS)
    told = in_another_process(model, store, settings(dtype), STEPS, [each.session for each in saved])
    for each, mine, theirs, restored in zip(saved, live, told["digests"], told["restored"], strict=True):
        assert restored[0] == "exact", each.label
        assert restored[2] == 0, f"{each.label}: tokens were read again"
        assert mine == theirs, each.label
    assert len({tuple(digests) for digests in live}) >= len(saved) - 1, "the scenarios must differ"


@pytest.mark.parametrize(("model", "dtype"), GRID)
def test_resume_from_disk_is_exact(
    model: str, dtype: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    check(request.getfixturevalue(f"{model}_path"), dtype, str(tmp_path / "store"))


@pytest.mark.parametrize(("model", "dtype"), GRID[2:3] + GRID[10:11])
def test_resume_from_redis_is_exact(
    model: str, dtype: str, redis_server: RedisServer, request: pytest.FixtureRequest
) -> None:
    check(request.getfixturevalue(f"{model}_path"), dtype, redis_server.url)
