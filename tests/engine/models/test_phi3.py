"""Phi-3 against transformers, and what of its configurations is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import WeightsRefused
from tests.engine.weights.folders import change_config
from tests.oracles.base import check_numbers, open_engine, write
from tests.oracles.older import check_reworded
from tests.oracles.phi3 import make
from tests.oracles.refusals import check_refusals

VARIATIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "long table": {"original": 32},
    "long table, magnitude as the file has it": {"original": 32, "rope": (("attention_factor", 1.4),)},
    "plain rope": {"rope": (("rope_type", "default"),)},
    "windows": {"sliding_window": 12},
    "tied": {"tie_word_embeddings": True},
    "a head for each": {"num_key_value_heads": 4},
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_numbers(name: str, tmp_path: Path) -> None:
    # Logits of tied matrices are ten times as large.
    check_numbers("phi3", tmp_path, atol=2e-4 if name == "tied" else 1e-4, **VARIATIONS[name])


@pytest.mark.parametrize("original", [32, 256])
def test_older_files_have_the_first_context_and_the_share_outside(original: int, tmp_path: Path) -> None:
    tables = {name: make()[1].rope_parameters[name] for name in ("short_factor", "long_factor")}
    words = {
        "rope_parameters": ...,
        "rope_scaling": {"type": "su", **tables},
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
    }
    check_reworded("phi3", tmp_path, words, original=original)


def test_refusals(tmp_path: Path) -> None:
    cases = {
        "quantization_config": {"bits": 4},
        "hidden_act": "gelu",
        "attention_bias": True,
        "intermediate_size": ...,
        "rope_parameters.rope_type": "yarn",
        "rope_parameters.short_factor": [1.0] * 11 + [0.0],
        "rope_parameters.rope_theta": 0,
        "rope_parameters.partial_rotary_factor": 1.5,
        "rope_parameters.original_max_position_embeddings": -1,
        "sliding_window": -1,
        "num_key_value_heads": "2",
    }
    check_refusals("phi3", tmp_path, cases)
    check_refusals("phi3", tmp_path, {"rope_parameters.short_factor": [1.0] * 11})


def test_two_tables_without_the_length_that_parts_them_are_refused(tmp_path: Path) -> None:
    write("phi3", tmp_path)
    rope = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    rope.pop("original_max_position_embeddings", None)
    change_config(tmp_path, rope_parameters=rope, original_max_position_embeddings=...)
    with pytest.raises(WeightsRefused, match="original_max_position_embeddings"):
        open_engine(tmp_path)
