"""Cohere 2 against transformers, and what of its configurations is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.reading import read_all
from tests.engine.weights.folders import change_config
from tests.oracles.base import check_numbers, open_engine, reference, tokens, write
from tests.oracles.refusals import check_refusals

VARIATIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "untied": {"tie_word_embeddings": False, "logit_scale": 0.5},
    "biases": {"attention_bias": True},
    "no window": {"layer_types": ("full_attention",) * 4},
    "windows only": {"layer_types": ("sliding_attention",) * 4},
    "one head": {"num_key_value_heads": 1},
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_numbers(name: str, tmp_path: Path) -> None:
    check_numbers("cohere2", tmp_path, **VARIATIONS[name])


def test_older_files_say_how_far_apart_full_layers_are(tmp_path: Path) -> None:
    changes = {"layer_types": ("sliding_attention", "full_attention") * 2}
    write("cohere2", tmp_path, **changes)
    change_config(tmp_path, layer_types=..., sliding_window_pattern=2)
    ids = tokens()
    ours = torch.cat([logits for _, logits in read_all(open_engine(tmp_path), ids, (len(ids),))])
    torch.testing.assert_close(ours, reference("cohere2", ids, **changes), atol=1e-4, rtol=0)


def test_refusals(tmp_path: Path) -> None:
    cases = {
        "quantization_config": {"bits": 4},
        "hidden_act": "gelu",
        "logit_scale": "half",
        "layer_norm_eps": 0,
        "sliding_window": 0,
        "num_key_value_heads": 0,
        "attention_bias": True,
        "rope_parameters.rope_theta": -1.0,
        "layer_types": ["full_attention"] * 3 + ["linear_attention"],
    }
    check_refusals("cohere2", tmp_path, cases)
