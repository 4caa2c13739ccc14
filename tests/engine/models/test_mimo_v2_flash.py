"""MiMo-V2-Flash against transformers, and what of its configurations is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.errors import WeightsRefused
from tests.engine.weights.folders import change_config
from tests.oracles.base import check_numbers, open_engine, write
from tests.oracles.older import check_reworded
from tests.oracles.refusals import check_refusals

VARIATIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "groups": {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
    "shares as they are": {"norm_topk_prob": False, "routed_scaling_factor": 2.5},
    "dense": {"mlp_layer_types": ("dense",) * 4},
    "values as they are": {"attention_value_scale": None},
    "biases, tied": {"attention_bias": True, "tie_word_embeddings": True},
    "no window": {"layer_types": ("full_attention",) * 4},
    "one head": {"num_key_value_heads": 1},
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_numbers(name: str, tmp_path: Path) -> None:
    # Logits of tied matrices are eight times as large.
    check_numbers("mimo_v2_flash", tmp_path, atol=2e-4 if "tied" in name else 1e-4, **VARIATIONS[name])


def test_older_files_count_the_window_without_the_query_and_have_no_scale(tmp_path: Path) -> None:
    words = {"sliding_window": ..., "sliding_window_size": 11, "routed_scaling_factor": None}
    check_reworded("mimo_v2_flash", tmp_path, words)


def test_files_that_say_no_kinds_of_layers(tmp_path: Path) -> None:
    kinds = tuple("full_attention" if layer in (0, 5) else "sliding_attention" for layer in range(7))
    words = {"layer_types": ..., "mlp_layer_types": ...}
    check_reworded("mimo_v2_flash", tmp_path, words, layer_types=kinds, num_hidden_layers=7)


def test_older_files_have_bases_of_their_own(tmp_path: Path) -> None:
    words = {"rope_parameters": ..., "rope_theta": 5e6, "swa_rope_theta": 1e4, "partial_rotary_factor": 0.334}
    check_reworded("mimo_v2_flash", tmp_path, words)


def test_the_hubs_own_files_number_the_kinds_of_layers(tmp_path: Path) -> None:
    kinds = ("full_attention", "sliding_attention", "full_attention", "sliding_attention")
    ffns = ("dense", "sparse", "dense", "sparse")
    words = {
        "layer_types": ...,
        "mlp_layer_types": ...,
        "rms_norm_eps": ...,
        "hybrid_layer_pattern": [0, 1, 0, 1],
        "moe_layer_freq": [0, 1, 0, 1],
        "layernorm_epsilon": 1e-2,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "n_shared_experts": None,
    }
    changes = {"layer_types": kinds, "mlp_layer_types": ffns, "rms_norm_eps": 1e-2}
    check_reworded("mimo_v2_flash", tmp_path, words, **changes)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hybrid_layer_pattern", [0, 1, 2, 1]),
        ("hybrid_layer_pattern", [0, 1, 1]),
        ("moe_layer_freq", 1),
        ("swa_num_attention_heads", 2),
        ("swa_head_dim", 64),
        ("swa_v_head_dim", 64),
        ("add_swa_attention_sink_bias", False),
        ("add_full_attention_sink_bias", True),
        ("n_shared_experts", 1),
    ],
)
def test_layers_of_other_kinds_are_refused(field: str, value: object, tmp_path: Path) -> None:
    write("mimo_v2_flash", tmp_path)
    change_config(tmp_path, layer_types=..., mlp_layer_types=..., **{field: value})
    with pytest.raises(WeightsRefused, match=field):
        open_engine(tmp_path)


def test_refusals(tmp_path: Path) -> None:
    cases = {
        "quantization_config": {"quant_method": "fp8"},
        "v_head_dim": ...,
        "layer_types": ["chunked_attention"] * 4,
        "attention_value_scale": ...,
        "swa_num_key_value_heads": 3,
        "n_group": 3,
        "num_experts_per_tok": 9,
        "sliding_window": None,
        "attention_bias": True,
        "mlp_layer_types": ["dense"] * 3,
        "rope_parameters.full_attention.partial_rotary_factor": 0.33,
        "routed_scaling_factor": "1",
    }
    check_refusals("mimo_v2_flash", tmp_path, cases)
