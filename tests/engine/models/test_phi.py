"""Phi-2 against transformers, and what of its configurations is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.oracles.base import check_numbers
from tests.oracles.older import check_reworded
from tests.oracles.refusals import check_refusals

VARIATIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "norms of heads": {"qk_layernorm": True},
    "a head for each": {"num_key_value_heads": 4},
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_numbers(name: str, tmp_path: Path) -> None:
    check_numbers("phi", tmp_path, **VARIATIONS[name])


def test_older_files_that_say_no_share_turn_half(tmp_path: Path) -> None:
    check_reworded("phi", tmp_path, {"rope_parameters": ..., "rope_theta": 10000.0})


def test_refusals(tmp_path: Path) -> None:
    cases = {
        "quantization_config": {"bits": 4},
        "hidden_act": "relu",
        "tie_word_embeddings": True,
        "layer_norm_eps": 0.0,
        "rope_parameters.partial_rotary_factor": 0.1,
    }
    check_refusals("phi", tmp_path, cases)
