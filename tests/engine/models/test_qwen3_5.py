"""Qwen3.5 against transformers, alone and as the text model of one that sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.reading import read_all
from tests.oracles.base import LENGTH, check_numbers, open_engine, reference, tokens, write
from tests.oracles.refusals import check_refusals
from tests.oracles.variants import nest


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 3},
        {"num_key_value_heads": 4, "head_dim": 64},
    ],
    ids=lambda changes: ",".join(changes) or "as it is",
)
def test_numbers(changes: dict[str, Any], tmp_path: Path) -> None:
    check_numbers("qwen3_5", tmp_path, **changes)


def test_the_text_model_of_one_that_sees_is_found(tmp_path: Path) -> None:
    write("qwen3_5", tmp_path)
    nest(tmp_path, "model.language_model", "qwen3_5")
    ours = torch.cat([logits for _, logits in read_all(open_engine(tmp_path), tokens(), [LENGTH])])
    assert float((ours - reference("qwen3_5", tokens())).abs().max()) < 1e-4


def test_refusals(tmp_path: Path) -> None:
    cases: dict[str, Any] = {
        "intermediate_size": ...,
        "linear_num_value_heads": 3,
        "linear_conv_kernel_dim": 1,
        "hidden_act": "relu",
        "attn_output_gate": False,
        "layer_types": ["full_attention"] * 4,
        "rope_parameters.rope_theta": -1.0,
    }
    check_refusals("qwen3_5", tmp_path, cases)
