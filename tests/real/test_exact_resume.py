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
ON_DISK = {("smollm2", "bf16"), ("smollm2", "q8_0"), ("gemma3", "bf16"), ("gemma3", "q4_0")}
ON_REDIS = {("smollm2", "bf16"), ("gemma3", "bf16")}


def grid(gate: set[tuple[str, str]]) -> list[object]:
    """Both models with every cache dtype; those outside of `gate` are slow."""
    return [
        pytest.param(model, dtype, marks=() if (model, dtype) in gate else pytest.mark.slow)
        for model in ("smollm2", "gemma3")
        for dtype in ("f32", "f16", "bf16", "q8_0", "q5_0", "q4_0")
    ]


def check(model: Path, dtype: str, store: str, full_windows: bool = False) -> None:
    settings: dict[str, object] = {
        "n_ctx": 1024,
        "num_cells": 4096,
        "num_seqs": 12,
        "type_k": dtype,
        "type_v": dtype,
        "threads": 1,
        "full_windows": full_windows,
    }
    engine = load_engine(model, EngineConfig.from_mapping(settings))
    manager = SessionManager(open_store(store), engine)
    saved = save_scenario(manager, engine.tokenizer.encode(long_text()), CUTS)
    live = go_on(engine, [each.seq for each in saved], STEPS)
    told = in_another_process(model, store, settings, STEPS, [each.session for each in saved])
    for each, mine, theirs, restored in zip(saved, live, told["digests"], told["restored"], strict=True):
        assert restored[0] == "exact", each.label
        assert restored[2] == 0, f"{each.label}: tokens were read again"
        assert mine == theirs, each.label
    assert len({tuple(digests) for digests in live}) >= len(saved) - 1, "the scenarios must differ"


@pytest.mark.parametrize(("model", "dtype"), grid(ON_DISK))
def test_resume_from_disk_is_exact(
    model: str, dtype: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    check(request.getfixturevalue(f"{model}_path"), dtype, str(tmp_path / "store"))


@pytest.mark.parametrize(("model", "dtype"), grid(ON_REDIS))
def test_resume_from_redis_is_exact(
    model: str, dtype: str, redis_server: RedisServer, request: pytest.FixtureRequest
) -> None:
    check(request.getfixturevalue(f"{model}_path"), dtype, redis_server.url)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "q8_0"])
def test_a_windowed_model_that_keeps_its_windows_whole_can_be_shifted_too(
    dtype: str, gemma3_path: Path, tmp_path: Path
) -> None:
    check(gemma3_path, dtype, str(tmp_path / "store"), full_windows=True)
