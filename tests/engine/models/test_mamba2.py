"""Mamba-2 against transformers. Differences are of float32: at most 1e-4 at logits of deviation 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.reading import read_all
from tests.engine.weights.folders import change_config
from tests.oracles.base import LENGTH, check_numbers, open_engine, reference, tokens, write
from tests.oracles.refusals import check_refusals
from tests.oracles.stepwise import in_parts

#: where the embedding is the output matrix too, logits have a deviation of 8
TIED = 5e-4


def test_numbers(tmp_path: Path) -> None:
    check_numbers("mamba2", tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"n_groups": 1},
        {"n_groups": 8, "conv_kernel": 2},
        {"use_bias": True, "use_conv_bias": False},
        {"tie_word_embeddings": True},
        {"time_step_limit": (0.01, 0.05)},
        {"expand": 3, "num_heads": 6, "head_dim": 32},
    ],
    ids=str,
)
def test_numbers_of_variations(tmp_path: Path, changes: dict[str, Any]) -> None:
    check_numbers("mamba2", tmp_path, atol=TIED if "tie_word_embeddings" in changes else 1e-4, **changes)


@pytest.mark.parametrize("limit", [[0.0, float("inf")], [0, {"__float__": "Infinity"}], None, ...])
def test_no_limit_is_said_in_several_ways(tmp_path: Path, limit: object) -> None:
    write("mamba2", tmp_path)
    change_config(tmp_path, time_step_limit=limit)
    ((_, ours),) = read_all(open_engine(tmp_path), tokens(), (LENGTH,))
    assert (ours - reference("mamba2", tokens())).abs().max() < 1e-4


def test_the_reference_forgets_its_limits_token_by_token() -> None:
    """Why decoding is compared with a full pass: token by token the reference forgets the limits."""
    limited = {"time_step_limit": (0.01, 0.05)}
    full = reference("mamba2", tokens(), **limited)
    one_by_one = in_parts("mamba2", tokens(), (1,) * LENGTH, "cache_params", **limited)
    assert (one_by_one - full).abs().max() > 0.01


def test_bad_configurations_are_refused_by_their_field(tmp_path: Path) -> None:
    cases: dict[str, Any] = {
        "num_heads": 7,
        "head_dim": 15,
        "n_groups": ...,
        "state_size": ...,
        "conv_kernel": 1,
        "hidden_act": "gelu",
        "use_bias": True,
        "use_conv_bias": False,
        "time_step_limit": [0.5, "much"],
    }
    check_refusals("mamba2", tmp_path, cases)
