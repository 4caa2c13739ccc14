"""GLM-5-Next with random weights computes what transformers computes, and notices whatever decides it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.cache import hybrid_idx
from engine.runner import Engine
from tests.engine.reading import read_all
from tests.engine.weights.folders import change_config
from tests.oracles.base import SHAPES, check_numbers, open_engine, reference, tokens, write
from tests.oracles.refusals import check_refusals

FAMILY = "glm5_next"
ATOL = 2e-5
LINEAR, INDEXED, FULL = "linear_attention", "indexed_attention", "full_attention"

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one pool of five": {"index_kpool": 5, "index_topk": 5},
    "pools of two": {"index_kpool": 2, "index_topk": 12, "index_head_dim": 64},
    "everything is read": {"index_topk": 64},
    "a shared choice": {
        "layer_types": (LINEAR, INDEXED, INDEXED, LINEAR),
        "indexer_types": ("full", "full", "shared", "full"),
    },
    "shared by several and across a delta": {
        "layer_types": (INDEXED, INDEXED, LINEAR, INDEXED),
        "indexer_types": ("full", "shared", "shared", "shared"),
    },
    "files' own word": {"layer_types": (LINEAR, LINEAR, LINEAR, FULL)},
    "no attention": {"layer_types": (LINEAR,) * 4},
    "no delta": {"layer_types": (INDEXED,) * 4},
    "forgetting without a bound": {"linear_lower_bound": None},
    "another bound": {"linear_lower_bound": -1.0, "linear_conv_kernel_dim": 3, "linear_num_heads": 2},
    "four streams": {"hc_mult": 4, "hc_sinkhorn_iters": 3, "hc_eps": 1e-3},
    "groups": {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "norm_topk_prob": False},
    "clamped": {"swiglu_limit": 0.5, "n_shared_experts": 2, "routed_scaling_factor": 1.0},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_the_references(variant: str, tmp_path: Path) -> None:
    check_numbers(FAMILY, tmp_path, ATOL, **VARIANTS[variant])


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp(FAMILY)
    write(FAMILY, folder)
    return open_engine(folder)


def read(engine: Engine, ids: list[int], shape: str = "irregular") -> torch.Tensor:
    return torch.cat([logits for _, logits in read_all(engine, ids, SHAPES[shape])])


def the_worst(scores: torch.Tensor, positions: torch.Tensor, block: int, most: int) -> torch.Tensor:
    return PICK(-scores, positions, block, most)


def all_closed(scores: torch.Tensor, positions: torch.Tensor, block: int, most: int) -> torch.Tensor:
    return PICK(scores, positions, block, scores.shape[1])


PICK = hybrid_idx.pick_blocks


@pytest.mark.parametrize("wrong", [the_worst, all_closed])
def test_another_choice_would_be_noticed(wrong: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the numbers above would prove nothing of the indexer."""
    monkeypatch.setattr(hybrid_idx, "pick_blocks", wrong)
    assert (read(engine, tokens()) - reference(FAMILY, tokens())).abs().max() > 0.1


def test_the_words_of_the_hubs_own_files_are_understood(tmp_path: Path) -> None:
    write(FAMILY, tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    text["linear_attn_config"] = {
        "num_heads": text.pop("linear_num_heads"),
        "head_dim": text.pop("linear_head_dim"),
        "short_conv_kernel_size": text.pop("linear_conv_kernel_dim"),
        "gate_lower_bound": text.pop("linear_lower_bound"),
    }
    text["first_k_dense_replace"] = 1
    for name in ("mlp_layer_types", "indexer_types"):
        del text[name]
    change_config(tmp_path, text_config=text)
    theirs = reference(FAMILY, tokens())
    assert (read(open_engine(tmp_path), tokens()) - theirs).abs().max() <= ATOL


def test_indexers_that_are_counted_are_those_that_are_named(tmp_path: Path) -> None:
    changes = {"layer_types": (INDEXED,) * 4, "indexer_types": ("full", "full", "shared", "shared")}
    write(FAMILY, tmp_path, **changes)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    del text["indexer_types"]
    change_config(tmp_path, text_config={**text, "index_topk_freq": 3})
    theirs = reference(FAMILY, tokens(), **changes)
    assert (read(open_engine(tmp_path), tokens()) - theirs).abs().max() <= ATOL


def test_configurations_that_are_not_supported_are_refused(tmp_path: Path) -> None:
    cases = {
        "hidden_act": "gelu",
        "attention_bias": True,
        "num_key_value_heads": 2,
        "qk_rope_head_dim": 8,
        "q_lora_rank": None,
        "layer_types": ["linear_attention", "sliding_attention"] * 2,
        "indexer_types": ["full", "shared", "full", "full"],
        "index_kpool": 1,
        "index_topk": 10,
        "index_kpool_always_select_tail": False,
        "linear_lower_bound": ...,
        "linear_attn_config": {"num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 1},
        "linear_conv_kernel_dim": 1,
        "hc_mult": 0,
        "hc_sinkhorn_iters": 0,
        "swiglu_limit": 0.0,
        "num_experts_per_tok": 5,
        "n_group": 3,
        "mlp_layer_types": ["dense"] * 3,
        "quantization_config": {"quant_method": "fp8"},
    }
    check_refusals(FAMILY, tmp_path, {f"text_config.{name}": value for name, value in cases.items()})
    check_refusals(FAMILY, tmp_path, {"text_config.linear_lower_bound": 0.5})
