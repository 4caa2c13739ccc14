"""Falcon-H1 against transformers. Differences are of float32: at most 1e-4 at logits of deviation 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.oracles.base import check_numbers
from tests.oracles.refusals import check_refusals

#: where the embedding is the output matrix too, logits have a deviation of 8
TIED = 5e-4


def test_numbers(tmp_path: Path) -> None:
    check_numbers("falcon_h1", tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"mamba_rms_norm": True},
        {"mamba_norm_before_gate": False, "mamba_rms_norm": True},
        {"mamba_n_groups": 1, "mamba_d_head": "auto", "mamba_d_ssm": None},
        {"tie_word_embeddings": True, "ssm_multipliers": None, "mlp_multipliers": None},
        {
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "mamba_conv_bias": False,
        },
        {"time_step_limit": (0.01, 0.05)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_numbers_of_variations(tmp_path: Path, changes: dict[str, Any]) -> None:
    check_numbers("falcon_h1", tmp_path, atol=TIED if "tie_word_embeddings" in changes else 1e-4, **changes)


def test_bad_configurations_are_refused_by_their_field(tmp_path: Path) -> None:
    cases: dict[str, Any] = {
        "mamba_n_heads": ...,
        "mamba_d_head": 15,
        "mamba_n_groups": 3,
        "mamba_d_state": 0,
        "mamba_d_conv": 1,
        "hidden_act": "gelu",
        "ssm_multipliers": [1.0, 1.0],
        "mlp_multipliers": [1.0],
        "key_multiplier": "big",
        "time_step_limit": [0.5, 0.1],
        "attention_bias": True,
        "mamba_conv_bias": False,
    }
    check_refusals("falcon_h1", tmp_path, cases)
