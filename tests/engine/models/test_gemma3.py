"""Gemma 3 with random weights computes what transformers computes, in windows and outside of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.models.oracle import check


def pattern(local: int, full: int) -> dict[str, Any]:
    """`local` layers with a window to `full` ones that see everything, twice."""
    layers = (["sliding_attention"] * local + ["full_attention"] * full) * 2
    return {"layer_types": layers, "num_hidden_layers": len(layers)}


@pytest.mark.parametrize("window", [1, 8, 24, 100])
def test_a_window_that_wraps_many_times_is_the_same_window(window: int, tmp_path: Path) -> None:
    check(tmp_path, "gemma3_text", sliding_window=window)


@pytest.mark.parametrize("local", [1, 2, 5])
def test_every_pattern_of_windows_is_followed(local: int, tmp_path: Path) -> None:
    check(tmp_path, "gemma3_text", **pattern(local, 1))


@pytest.mark.parametrize(
    "changes",
    [
        {"query_pre_attn_scalar": 64},
        {"tie_word_embeddings": False},
        {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32},
    ],
    ids=lambda changes: "+".join(changes),
)
def test_sizes_and_scales_are_the_files(changes: dict[str, Any], tmp_path: Path) -> None:
    check(tmp_path, "gemma3_text", **changes)


def test_near_and_far_layers_turn_by_their_own_frequencies(tmp_path: Path) -> None:
    near = {"rope_type": "default", "rope_theta": 300.0}
    far = {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0}
    check(tmp_path, "gemma3_text", rope_parameters={"sliding_attention": near, "full_attention": far})
