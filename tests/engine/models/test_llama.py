"""llama, mistral, qwen2 and qwen3 with random weights compute what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.models.oracle import check

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINAL = {"original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 20}),
        ("llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-3}),
        ("qwen2", {"tie_word_embeddings": False}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
        ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(f"{k}={v}" for k, v in value.items()),
)
def test_every_shape_of_work_gives_the_logits_of_transformers(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    check(tmp_path, family, **changes)


@pytest.mark.parametrize("window", [1, 7, 24, 64])
def test_a_window_that_wraps_many_times_is_the_same_window(window: int, tmp_path: Path) -> None:
    check(tmp_path, "mistral", sliding_window=window)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 3.0},
        {**LLAMA3, **ORIGINAL},
        {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0, "beta_slow": 2.0, **ORIGINAL},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3, **ORIGINAL},
    ],
    ids=["linear", "llama3", "yarn", "yarn betas", "yarn magnitude"],
)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_stretched_frequencies_are_those_of_transformers(
    family: str, rope: dict[str, Any], tmp_path: Path
) -> None:
    check(tmp_path, family, rope_parameters={"rope_theta": 5000.0, **rope})
