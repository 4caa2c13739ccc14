"""Gemma 2 against transformers, and what of its configurations is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.oracles.base import check_numbers
from tests.oracles.older import check_reworded
from tests.oracles.refusals import check_refusals

VARIATIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "no caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    "untied": {"tie_word_embeddings": False},
    "biases": {"attention_bias": True},
    "other layers": {
        "layer_types": ("full_attention", "full_attention", "sliding_attention", "full_attention")
    },
    "no window": {"layer_types": ("full_attention",) * 4},
    "one head": {"num_key_value_heads": 1},
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_numbers(name: str, tmp_path: Path) -> None:
    # Without the cap, logits of tied matrices are eight times as large.
    check_numbers("gemma2", tmp_path, atol=2e-4 if name == "no caps" else 1e-4, **VARIATIONS[name])


def test_files_that_say_no_kinds_of_layers(tmp_path: Path) -> None:
    words = {"layer_types": ..., "rope_parameters": ..., "rope_theta": 10000.0}
    check_reworded("gemma2", tmp_path, words)


def test_refusals(tmp_path: Path) -> None:
    cases = {
        "quantization_config": {"bits": 4},
        "attn_logit_softcapping": ...,
        "final_logit_softcapping": 0,
        "query_pre_attn_scalar": -1,
        "hidden_activation": "gelu",
        "use_bidirectional_attention": True,
        "sliding_window": ...,
        "attention_bias": True,
        "head_dim": 31,
        "layer_types": ["full_attention"] * 3,
    }
    check_refusals("gemma2", tmp_path, cases)
