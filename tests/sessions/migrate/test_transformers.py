"""Caches of transformers as sessions: proven where the file has what the last tokens see, else read anew."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import DynamicCache

from engine.errors import Unproven
from serialization.brought import Proven
from serialization.foreign.foreign_state import ForeignState
from serialization.foreign.readers import read_foreign
from sessions.migrate.geometry import own_geometry_of
from sessions.migrate.imports import Taking, Wish, examine
from tests.exact.members import folder
from tests.oracles import base
from tests.serialization.foreign.test_torch_dump import run
from tests.serialization.foreign.transformers_functions import functions

IDS = base.tokens(3, 40)


def dumped(family: str, path: Path, *, recording: bool = False) -> ForeignState:
    """The state of transformers' model after `IDS`, read for the engine's."""
    model = base.build(family)
    cache = DynamicCache(config=model.config)
    if recording:
        cache.activate_past_recording()
    run(model, cache, IDS)
    functions()["save_cache"](cache, path, IDS, model.config.model_type)
    return read_foreign(path, own_geometry_of(base.open_engine(folder(family))))


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "qwen3"])
def test_rows_of_every_token_are_proven(family: str, tmp_path: Path) -> None:
    found = examine(base.open_engine(folder(family)), dumped(family, tmp_path / "cache"), Wish())
    assert found.brought.proven is Proven.ROWS
    assert found.proof is not None
    assert (found.proof.num_rows, found.num_read) == (8, 0)
    assert found.proof.worst.drift < 1e-4


@pytest.mark.parametrize("family", ["gemma3", "cohere2"])
def test_windows_of_transformers_are_too_short_for_a_proof(family: str, tmp_path: Path) -> None:
    """It keeps what the next token sees, and not what the last one saw."""
    engine, state = base.open_engine(folder(family)), dumped(family, tmp_path / "cache")
    found = examine(engine, state, Wish())
    assert (found.brought.proven, found.rows, found.num_read) == (Proven.REREAD, None, len(IDS))
    with pytest.raises(Unproven, match="fewer window rows than its last token sees"):
        examine(engine, state, Wish(taking=Taking.TRUSTED))
    trusted = examine(engine, state, Wish(taking=Taking.TRUSTED, tokens=(*IDS, 7)))
    assert (trusted.brought.proven, trusted.num_read) == (Proven.UNVERIFIED, 1)


@pytest.mark.parametrize("family", ["gemma3", "cohere2"])
def test_windows_are_proven_where_transformers_recorded_the_past(family: str, tmp_path: Path) -> None:
    state = dumped(family, tmp_path / "cache", recording=True)
    found = examine(base.open_engine(folder(family)), state, Wish())
    assert found.brought.proven is Proven.ROWS
    assert found.proof is not None
    assert found.proof.num_rows == 8
    assert found.proof.worst.drift < 1e-4


def test_a_row_that_the_model_does_not_compute_is_found_out(tmp_path: Path) -> None:
    state = dumped("qwen3", tmp_path / "cache")
    data = state.caches[0].rows[0].data
    data[-8:] = data[:8].clone()
    with pytest.raises(Unproven):
        examine(base.open_engine(folder("qwen3")), state, Wish())


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next"])
def test_recurrent_state_is_read_anew_or_trusted(family: str, tmp_path: Path) -> None:
    engine, state = base.open_engine(folder(family)), dumped(family, tmp_path / "cache")
    assert examine(engine, state, Wish()).brought.proven is Proven.REREAD
    trusted = examine(engine, state, Wish(taking=Taking.TRUSTED, tokens=(*IDS, 7)))
    assert (trusted.brought.proven, trusted.num_read) == (Proven.UNVERIFIED, 1)
