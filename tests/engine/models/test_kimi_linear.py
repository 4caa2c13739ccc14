"""Kimi Linear against transformers, and with Kimi K3's bounded forgetting."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import WeightsRefused
from engine.loader import load_engine
from tests.engine.reading import read_all
from tests.engine.weights.folders import change_config
from tests.oracles.base import LENGTH, check_numbers, open_engine, reference, tokens, write
from tests.oracles.refusals import check_refusals

FULL, LINEAR = "full_attention", "linear_attention"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bound": -5.0},
        {"bound": -0.1},
        {"q_lora_rank": 24},
        {"q_lora_rank": 24, "attention_bias": True},
        {"n_group": 2, "topk_group": 1, "norm_topk_prob": False, "n_shared_experts": 2},
        {"qk_rope_head_dim": 8, "qk_nope_head_dim": 24, "v_head_dim": 32},
        {"linear_num_heads": 2, "linear_head_dim": 24, "linear_conv_kernel_dim": 2},
        {"layer_types": (FULL, LINEAR, FULL, LINEAR), "mlp_layer_types": ("sparse", "dense") * 2},
    ],
    ids=lambda changes: ",".join(f"{name}={value}" for name, value in changes.items())[:40] or "as it is",
)
def test_numbers(changes: dict[str, Any], tmp_path: Path) -> None:
    check_numbers("kimi_linear", tmp_path, **changes)


def test_the_hubs_own_words_mean_the_same(tmp_path: Path) -> None:
    """An object of what delta attention has, layers by numbers from 1, and `mlp` for the dense layer."""
    write("kimi_linear", tmp_path)
    path = tmp_path / "model.safetensors"
    dense = re.compile(r"block_sparse_moe\.(gate|up|down)_proj")
    save_file({dense.sub(r"mlp.\1_proj", name): tensor for name, tensor in load_file(path).items()}, path)
    inner = {"full_attn_layers": [4], "kda_layers": [1, 2, 3], "num_heads": 4, "head_dim": 16}
    change_config(
        tmp_path,
        linear_attn_config={**inner, "short_conv_kernel_size": 4},
        first_k_dense_replace=1,
        moe_layer_freq=1,
        mla_use_nope=True,
        moe_router_activation_func="sigmoid",
        **dict.fromkeys(("layer_types", "mlp_layer_types", "linear_num_heads", "linear_head_dim"), ...),
        linear_conv_kernel_dim=...,
    )
    ours = torch.cat([logits for _, logits in read_all(open_engine(tmp_path), tokens(), [LENGTH])])
    assert float((ours - reference("kimi_linear", tokens())).abs().max()) < 1e-4


def test_quantized_rows_stay_near(tmp_path: Path) -> None:
    write("kimi_linear", tmp_path)
    engine = open_engine(tmp_path, type_k="q8_0", type_v="q8_0")
    ours = torch.cat([logits for _, logits in read_all(engine, tokens(), [40] + [1] * 24)])
    difference = (ours - reference("kimi_linear", tokens())).square().mean().sqrt()
    assert 1e-5 < float(difference) < 0.02


def test_the_trained_length_goes_by_another_name(tmp_path: Path) -> None:
    write("kimi_linear", tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_max_length"] == 256
    assert load_engine(tmp_path).config.n_ctx == 256


def test_refusals(tmp_path: Path) -> None:
    cases: dict[str, Any] = {
        "linear_head_dim": ...,
        "linear_conv_kernel_dim": 1,
        "layer_types": [FULL] * 4,
        "mlp_layer_types": ["dense"],
        "mla_use_nope": False,
        "tie_word_embeddings": True,
        "num_key_value_heads": 2,
        "num_expert_group": 3,
        "num_experts_per_token": 5,
        "moe_router_activation_func": "softmax",
        "attention_bias": True,
        "routed_scaling_factor": ...,
        "hidden_act": "gelu",
        "kv_lora_rank": 0,
    }
    check_refusals("kimi_linear", tmp_path, cases)


@pytest.mark.parametrize("bound", [5.0, 0.0, "low"])
def test_a_bound_that_is_none_is_refused(bound: Any, tmp_path: Path) -> None:
    write("kimi_linear", tmp_path, bound=-5.0)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("-5.0", json.dumps(bound)))
    with pytest.raises(WeightsRefused, match="gate_lower_bound"):
        open_engine(tmp_path)
