"""LFM2 against transformers. Logits of its tied matrices deviate by 12."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.reading import read_all
from tests.engine.weights.folders import change_config
from tests.oracles.base import LENGTH, check_numbers, open_engine, reference, tokens, write
from tests.oracles.older import check_full_pass
from tests.oracles.refusals import check_refusals
from tests.oracles.variants import nest


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False},
        {"conv_bias": True, "conv_L_cache": 4},
        {"kinds": "full_attention conv"},
        {"kinds": "conv conv conv", "conv_L_cache": 2},
        {"block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.3, "block_multiple_of": 32},
    ],
    ids=lambda changes: ",".join(changes) or "as it is",
)
def test_numbers(changes: dict[str, Any], tmp_path: Path) -> None:
    check_numbers("lfm2", tmp_path, **changes)


@pytest.mark.parametrize(("kinds", "kind"), [("conv full_attention", "hybrid"), ("conv conv", "recurrent")])
def test_convolutions_alone_are_a_recurrent_memory(kinds: str, kind: str, tmp_path: Path) -> None:
    write("lfm2", tmp_path, kinds=kinds)
    assert open_engine(tmp_path)._model.needs.kind == kind


def test_text_model_of_a_larger_one(tmp_path: Path) -> None:
    write("lfm2", tmp_path)
    nest(tmp_path, "model.language_model", "lfm2_vl")
    check_full_pass("lfm2", tmp_path)


def test_the_hubs_older_words_mean_the_same(tmp_path: Path) -> None:
    write("lfm2", tmp_path)
    older = {"full_attn_idxs": [2], "block_ff_dim": 96, "tie_embedding": True, "rope_theta": 1000000.0}
    gone = {"layer_types": ..., "intermediate_size": ..., "tie_word_embeddings": ..., "rope_parameters": ...}
    change_config(tmp_path, **older, **gone)
    ours = torch.cat([logits for _, logits in read_all(open_engine(tmp_path), tokens(), [LENGTH])])
    assert float((ours - reference("lfm2", tokens())).abs().max()) < 1e-4


@pytest.mark.parametrize("own", [False, True], ids=["the same", "its own"])
def test_an_output_matrix_in_the_file_counts_whatever_is_said_of_ties(own: bool, tmp_path: Path) -> None:
    write("lfm2", tmp_path)
    path = tmp_path / "model.safetensors"
    held = load_file(path)
    embedding = held["model.embed_tokens.weight"]
    save_file({**held, "lm_head.weight": embedding * 2 if own else embedding.clone()}, path)
    ours = torch.cat([logits for _, logits in read_all(open_engine(tmp_path), tokens(), [LENGTH])])
    expected = reference("lfm2", tokens()) * (2 if own else 1)
    assert float((ours - expected).abs().max()) < 2e-4


def test_refusals(tmp_path: Path) -> None:
    cases: dict[str, Any] = {
        "conv_L_cache": 1,
        "conv_bias": True,
        "layer_types": ["full_attention"] * 4,
        "norm_eps": "small",
        "block_auto_adjust_ff_dim": 1,
        "num_key_value_heads": 3,
    }
    check_refusals("lfm2", tmp_path, cases)
