"""Granite 4 against transformers. Differences are of float32: at most 1e-4 at logits of deviation 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.reading import read_all
from tests.engine.weights.folders import change_config
from tests.oracles.base import check_numbers, open_engine, reference, tokens, write
from tests.oracles.refusals import check_refusals

#: where the embedding is the output matrix too, logits have a deviation of 8
TIED = 5e-4


def test_numbers(tmp_path: Path) -> None:
    check_numbers("granitemoehybrid", tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"position_embedding_type": "rope"},
        {"num_local_experts": 0, "tie_word_embeddings": True},
        {"layer_types": None, "num_experts_per_tok": 1},
        {"layer_types": ("attention",) * 4, "num_attention_heads": 4, "num_key_value_heads": 2},
        {"mamba_n_groups": 1, "mamba_proj_bias": True, "mamba_conv_bias": False, "attention_bias": True},
    ],
    ids=str,
)
def test_numbers_of_variations(tmp_path: Path, changes: dict[str, Any]) -> None:
    check_numbers(
        "granitemoehybrid", tmp_path, atol=TIED if "tie_word_embeddings" in changes else 1e-4, **changes
    )


def test_older_files_name_layers_in_other_words(tmp_path: Path) -> None:
    write("granitemoehybrid", tmp_path)
    change_config(tmp_path, layer_types=["mamba", "mamba", "attention", "mamba"])
    ((_, ours),) = read_all(open_engine(tmp_path), tokens(), (64,))
    assert (ours - reference("granitemoehybrid", tokens())).abs().max() < 1e-4


def test_bad_configurations_are_refused_by_their_field(tmp_path: Path) -> None:
    cases: dict[str, Any] = {
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 7,
        "mamba_n_groups": 3,
        "mamba_d_state": ...,
        "hidden_act": "gelu",
        "mamba_proj_bias": True,
        "attention_bias": True,
        "position_embedding_type": "alibi",
        "num_experts_per_tok": 5,
        "num_attention_heads": ...,
        "logits_scaling": 0,
    }
    check_refusals("granitemoehybrid", tmp_path, cases)
