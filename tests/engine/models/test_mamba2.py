"""Mamba-2 against transformers. Differences are of float32: at most 1e-4 at logits of deviation 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.oracles.base import check_numbers
from tests.oracles.refusals import check_refusals


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
    check_numbers("mamba2", tmp_path, **changes)


def test_bad_configurations_are_refused_by_their_field(tmp_path: Path) -> None:
    cases: dict[str, Any] = {
        "num_heads": 7,
        "head_dim": ...,
        "n_groups": 3,
        "state_size": ...,
        "conv_kernel": 1,
        "hidden_act": "gelu",
        "use_bias": True,
        "use_conv_bias": False,
        "time_step_limit": [0.5, "much"],
    }
    check_refusals("mamba2", tmp_path, cases)
