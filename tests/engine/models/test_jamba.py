"""Jamba against transformers. Differences are of float32: at most 1e-4 at logits of deviation 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.oracles.base import LENGTH, SHAPES, check_numbers, reference, tokens
from tests.oracles.refusals import check_refusals
from tests.oracles.stepwise import in_parts

#: where the embedding is the output matrix too, logits have a deviation of 8
TIED = 5e-4


def test_numbers(tmp_path: Path) -> None:
    check_numbers("jamba", tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_layer_period": 2, "attn_layer_offset": 0, "num_attention_heads": 4},
        {"attn_layer_period": 8, "attn_layer_offset": 7},
        {"num_experts": 1, "tie_word_embeddings": True},
        {"mamba_d_state": 16, "mamba_dt_rank": 5, "mamba_expand": 3, "mamba_d_conv": 3},
        {"mamba_proj_bias": True, "mamba_conv_bias": False},
    ],
    ids=str,
)
def test_numbers_of_variations(tmp_path: Path, changes: dict[str, Any]) -> None:
    check_numbers("jamba", tmp_path, atol=TIED if "tie_word_embeddings" in changes else 1e-4, **changes)


def test_the_reference_begins_anew_with_every_run_of_tokens() -> None:
    """Why runs of tokens are compared with a full pass: through its own cache the reference goes on token by
    token, but a longer run starts from an empty state."""
    full = reference("jamba", tokens())
    one_by_one = in_parts("jamba", tokens(), (1,) * LENGTH)
    in_runs = in_parts("jamba", tokens(), SHAPES["irregular"])
    assert (one_by_one - full).abs().max() < 1e-4
    assert (in_runs - full).abs().max() > 0.1


def test_bad_configurations_are_refused_by_their_field(tmp_path: Path) -> None:
    cases: dict[str, Any] = {
        "attn_layer_offset": 4,
        "expert_layer_offset": 2,
        "num_experts_per_tok": 5,
        "mamba_d_conv": 1,
        "mamba_d_state": 0,
        "mamba_dt_rank": "some",
        "mamba_proj_bias": True,
        "mamba_conv_bias": False,
        "hidden_act": "gelu",
        "sliding_window": 16,
        "mamba_inner_layernorms": False,
        "num_attention_heads": ...,
    }
    check_refusals("jamba", tmp_path, cases)
