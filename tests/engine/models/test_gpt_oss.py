"""gpt-oss against transformers, and what of its configurations is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.gpt_oss import ClampedExperts
from tests.oracles.base import check_numbers, open_engine, write
from tests.oracles.gpt_oss import YARN
from tests.oracles.older import check_reworded
from tests.oracles.refusals import check_refusals

VARIATIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "clamped often": {"swiglu_limit": 0.5, "swiglu_alpha": 1.0},
    "whole pairs": {"rope": (("truncate", True),)},
    "magnitude": {"rope": (("attention_factor", 1.3), ("beta_fast", 8.0))},
    "plain rope": {"rope": (("rope_type", "default"),)},
    "no biases, tied": {"attention_bias": False, "tie_word_embeddings": True},
    "every expert": {"num_experts_per_tok": 4},
    "one window": {"layer_types": ("full_attention",) * 3 + ("sliding_attention",)},
    "no window": {"layer_types": ("full_attention",) * 4},
    "one head": {"num_key_value_heads": 1},
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_numbers(name: str, tmp_path: Path) -> None:
    # Logits of tied matrices are eight times as large.
    check_numbers("gpt_oss", tmp_path, atol=2e-4 if "tied" in name else 1e-4, **VARIATIONS[name])


def test_files_that_say_no_kinds_of_layers(tmp_path: Path) -> None:
    check_reworded("gpt_oss", tmp_path, {"layer_types": ...})


def test_older_files_say_rope_scaling(tmp_path: Path) -> None:
    rope = {**YARN, "type": YARN["rope_type"]}
    base = rope.pop("rope_theta")
    del rope["rope_type"]
    words = {"rope_parameters": ..., "rope_scaling": rope, "rope_theta": base}
    check_reworded("gpt_oss", tmp_path, words)


def test_refusals(tmp_path: Path) -> None:
    cases = {
        "quantization_config": {"quant_method": "mxfp4"},
        "hidden_size": ...,
        "num_local_experts": ...,
        "num_experts_per_tok": 5,
        "sliding_window": None,
        "layer_types": ["full_attention", "chunked_attention"] * 2,
        "num_key_value_heads": 3,
        "attention_bias": False,
        "swiglu_limit": "7",
        "swiglu_alpha": True,
        "rope_parameters": ...,
        "rope_parameters.rope_type": "spiral",
        "rope_parameters.factor": 0,
        "rope_parameters.truncate": 1,
        "rms_norm_eps": -1.0,
    }
    check_refusals("gpt_oss", tmp_path, cases)


def test_meaning_has_every_number_that_rows_depend_on(tmp_path: Path) -> None:
    write("gpt_oss", tmp_path)
    meaning = open_engine(tmp_path).fingerprint.meaning
    for name in ("sliding_window", "layer_types", "rope_parameters.factor", "rope_parameters.truncate"):
        assert any(key.endswith(f"config.{name}") for key in meaning), name


def test_gates_and_up_are_clamped_on_their_own_sides() -> None:
    """One expert of one value, with gate x and up -x: by hand."""
    one = torch.ones(1, 1, 1)
    experts = ClampedExperts(
        gate_up=torch.tensor([[[1.0], [-1.0]]]),
        gate_up_bias=torch.zeros(1, 2),
        down=one,
        down_bias=torch.tensor([[0.25]]),
        alpha=2.0,
        limit=3.0,
    )
    x = torch.tensor([[10.0], [-10.0], [1.0]])
    gate, up = torch.tensor([[3.0], [-10.0], [1.0]]), torch.tensor([[-3.0], [3.0], [-1.0]])
    torch.testing.assert_close(experts(0, x), (up + 1) * gate / (1 + (-2 * gate).exp()) + 0.25)
