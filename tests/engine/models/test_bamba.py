"""Bamba against transformers. Differences are of float32: at most 1e-4 at logits of deviation 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from tests.engine.reading import read_all
from tests.engine.weights.folders import change_config
from tests.oracles.base import LENGTH, build, check_numbers, open_engine, reference, tokens, write
from tests.oracles.refusals import check_refusals

#: where the embedding is the output matrix too, logits have a deviation of 8
TIED = 5e-4


def test_numbers(tmp_path: Path) -> None:
    check_numbers("bamba", tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_layer_indices": (0, 3), "num_attention_heads": 4, "num_key_value_heads": 2},
        {"attn_layer_indices": None},
        {"attn_layer_indices": (0, 1, 2, 3)},
        {"mamba_n_groups": 1, "mamba_d_head": "auto", "mamba_expand": 3},
        {
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "tie_word_embeddings": True,
        },
    ],
    ids=str,
)
def test_numbers_of_variations(tmp_path: Path, changes: dict[str, Any]) -> None:
    check_numbers("bamba", tmp_path, atol=TIED if "tie_word_embeddings" in changes else 1e-4, **changes)


def test_the_reference_forgets_where_it_is_unless_it_is_told() -> None:
    """Why decoding is compared with a full pass: positions that transformers makes up itself start at 0 in
    every call, whatever the cache holds."""
    ids = torch.tensor([tokens()])
    model, cache = build("bamba"), DynamicCache(config=build("bamba").config)
    with torch.inference_mode():
        model(input_ids=ids[:, :40], past_key_values=cache, use_cache=True)
        untold = model(input_ids=ids[:, 40:41], past_key_values=cache, use_cache=True).logits
    assert (untold[0, 0] - reference("bamba", tokens())[40]).abs().max() > 0.01


def test_bad_configurations_are_refused_by_their_field(tmp_path: Path) -> None:
    cases: dict[str, Any] = {
        "attn_layer_indices": [4],
        "mamba_n_heads": 7,
        "mamba_d_head": 15,
        "mamba_n_groups": 3,
        "mamba_d_state": ...,
        "mamba_d_conv": 1,
        "hidden_act": "gelu",
        "mamba_proj_bias": True,
        "mamba_conv_bias": False,
        "mlp_bias": True,
        "attention_bias": True,
        "intermediate_size": ...,
        "rms_norm_eps": 0,
    }
    check_refusals("bamba", tmp_path, cases)


def test_older_files_do_not_say_what_share_of_a_head_turns(tmp_path: Path) -> None:
    write("bamba", tmp_path)
    change_config(tmp_path, rope_parameters=..., rope_theta=10_000.0, rope_scaling=None)
    ((_, ours),) = read_all(open_engine(tmp_path), tokens(), (LENGTH,))
    assert (ours - reference("bamba", tokens())).abs().max() < 1e-4
