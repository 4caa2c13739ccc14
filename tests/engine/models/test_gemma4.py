"""Gemma 4 against transformers, and what of its configurations is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.base import Placement
from engine.models.gemma4 import Gemma4
from engine.weights.hub_names import HubWeights
from tests.oracles.base import check_numbers, write
from tests.oracles.older import check_full_pass, check_reworded
from tests.oracles.refusals import check_refusals
from tests.oracles.variants import nest

EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
VARIATIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "rows of their own": {"num_kv_shared_layers": 0},
    "readers are wider": {"use_double_wide_mlp": True},
    "experts": EXPERTS,
    "keys are values": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    # Without sharing: transformers 5.23 itself fails where layers share rows and have no inputs of their own.
    "no inputs of layers": {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    "no cap": {"final_logit_softcapping": None},
    "biases, untied": {"attention_bias": True, "tie_word_embeddings": False},
    "no window": {"layer_types": ("full_attention",) * 6},
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_numbers(name: str, tmp_path: Path) -> None:
    # Without the cap, logits of tied matrices are eight times as large.
    check_numbers("gemma4", tmp_path, atol=2e-4 if name == "no cap" else 1e-4, **VARIATIONS[name])


def test_text_model_of_a_larger_one(tmp_path: Path) -> None:
    write("gemma4", tmp_path)
    nest(tmp_path, "model.language_model", "gemma4")
    check_full_pass("gemma4", tmp_path)


def test_files_that_say_heads_for_all_full_layers(tmp_path: Path) -> None:
    check_reworded("gemma4", tmp_path, {"per_layer_config": ..., "global_head_dim": 64})


def test_files_that_say_key_heads_for_all_full_layers(tmp_path: Path) -> None:
    changes = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    words = {"per_layer_config": ..., "global_head_dim": 64, "num_global_key_value_heads": 1}
    check_reworded("gemma4", tmp_path, words, **changes)


def test_files_that_say_no_kinds_of_layers(tmp_path: Path) -> None:
    kinds = tuple("full_attention" if layer in (5, 6) else "sliding_attention" for layer in range(7))
    changes = {"layer_types": kinds, "num_hidden_layers": 7, "num_kv_shared_layers": 1}
    check_reworded("gemma4", tmp_path, {"layer_types": ...}, **changes)


def test_shared_layers_keep_no_rows(tmp_path: Path) -> None:
    write("gemma4", tmp_path)
    model = Gemma4(HubWeights(tmp_path), Placement(torch.float32, torch.device("cpu"), 256))
    assert {part.layer for part in model.needs.parts} == {0, 1, 2}
    assert model.layout.sources == (0, 1, 2, 1, 1, 2)


def test_refusals(tmp_path: Path) -> None:
    cases = {
        "quantization_config": {"bits": 4},
        "hidden_activation": "silu",
        "use_bidirectional_attention": "all",
        "num_kv_shared_layers": 4,
        "layer_types": ["full_attention"] * 5 + ["sliding_attention"],
        "per_layer_config": {"2": {"head_dim": 32}, "5": {"head_dim": 64}},
        "final_logit_softcapping": ...,
        "enable_moe_block": "yes",
        "attention_bias": True,
        "hidden_size_per_layer_input": ...,
        "rope_parameters": ...,
        "rope_parameters.full_attention.partial_rotary_factor": 0.0,
        "rope_parameters.full_attention.rope_type": "spiral",
    }
    check_refusals("gemma4", tmp_path, cases)
