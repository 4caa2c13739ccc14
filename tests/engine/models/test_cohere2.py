"""Cohere 2 against transformers, and what of its configurations is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.cache.memory import KEYS
from engine.models.base import Placement
from engine.models.cohere2 import Cohere2
from engine.weights.hub_names import HubWeights
from tests.oracles.base import check_numbers, write
from tests.oracles.older import check_full_pass, check_reworded
from tests.oracles.refusals import check_refusals
from tests.oracles.variants import nest

VARIATIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "untied": {"tie_word_embeddings": False, "logit_scale": 0.5},
    "biases": {"attention_bias": True},
    "no window": {"layer_types": ("full_attention",) * 4},
    "windows only": {"layer_types": ("sliding_attention",) * 4},
    "one head": {"num_key_value_heads": 1},
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_numbers(name: str, tmp_path: Path) -> None:
    check_numbers("cohere2", tmp_path, **VARIATIONS[name])


@pytest.mark.parametrize("trunk", ["model.language_model", "language_model.model"])
def test_text_model_of_a_larger_one(trunk: str, tmp_path: Path) -> None:
    write("cohere2", tmp_path)
    nest(tmp_path, trunk, "cohere2_vision")
    check_full_pass("cohere2", tmp_path)


def test_older_files_say_how_far_apart_full_layers_are(tmp_path: Path) -> None:
    changes = {"layer_types": ("sliding_attention", "full_attention") * 2}
    words = {"layer_types": ..., "sliding_window_pattern": 2}
    check_reworded("cohere2", tmp_path, words, **changes)


def test_files_that_say_no_kinds_of_layers(tmp_path: Path) -> None:
    check_reworded("cohere2", tmp_path, {"layer_types": ...})


def test_a_shift_turns_rows_of_layers_with_rope_alone(tmp_path: Path) -> None:
    write("cohere2", tmp_path)
    needs = Cohere2(HubWeights(tmp_path), Placement(torch.float32, torch.device("cpu"), 256)).needs
    turned = [part.turned is not None for part in needs.parts if part.name == KEYS]
    assert turned == [True, True, True, False]


def test_refusals(tmp_path: Path) -> None:
    cases = {
        "quantization_config": {"bits": 4},
        "hidden_act": "gelu",
        "logit_scale": "half",
        "layer_norm_eps": 0,
        "sliding_window": 0,
        "num_key_value_heads": 0,
        "attention_bias": True,
        "rope_parameters.rope_theta": -1.0,
        "layer_types": ["full_attention"] * 3 + ["linear_attention"],
    }
    check_refusals("cohere2", tmp_path, cases)
