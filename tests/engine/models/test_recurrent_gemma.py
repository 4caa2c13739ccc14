"""RecurrentGemma against the full pass of transformers, which keeps its state in its modules and loses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.models.base import DEFAULT_CONTEXT
from tests.oracles.base import check_numbers, open_engine, write
from tests.oracles.refusals import check_refusals


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False, "logits_soft_cap": 5.0},
        {"attention_bias": True, "num_key_value_heads": 4},
        {"attention_window_size": 1, "num_key_value_heads": 1},
        {"attention_window_size": 100, "conv1d_width": 2},
        {"block_types": ("attention", "recurrent"), "lru_width": 128},
    ],
    ids=lambda changes: ",".join(changes) or "as it is",
)
def test_numbers(changes: dict[str, Any], tmp_path: Path) -> None:
    check_numbers("recurrent_gemma", tmp_path, **changes)


def test_a_model_without_a_trained_length_gets_one(tmp_path: Path) -> None:
    write("recurrent_gemma", tmp_path)
    assert open_engine(tmp_path)._model.n_ctx_train == DEFAULT_CONTEXT


def test_refusals(tmp_path: Path) -> None:
    cases: dict[str, Any] = {
        "block_types": ["recurrent"],
        "attention_window_size": ...,
        "hidden_activation": "silu",
        "logits_soft_cap": 0,
        "lru_width": 97,
        "conv1d_width": 1,
        "attention_bias": True,
        "rope_parameters.partial_rotary_factor": 1.5,
        "intermediate_size": 1,
    }
    check_refusals("recurrent_gemma", tmp_path, cases)
