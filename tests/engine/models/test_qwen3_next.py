"""Qwen3-Next against transformers. Differences are of float32: 4e-5 at most, at logits of deviation 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.reading import read_all
from tests.engine.weights.folders import change_config
from tests.oracles.base import LENGTH, check_numbers, open_engine, reference, tokens, write
from tests.oracles.refusals import check_refusals

FULL, LINEAR = "full_attention", "linear_attention"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"norm_topk_prob": False, "num_experts_per_tok": 3},
        {"mlp_only_layers": (1,), "decoder_sparse_step": 2},
        {"num_experts": 0},
        {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 2},
        {"linear_num_key_heads": 1, "linear_key_head_dim": 24, "linear_value_head_dim": 16},
        {"num_key_value_heads": 1, "rms_norm_eps": 1e-3},
        {"layer_types": (FULL, LINEAR, FULL), "num_hidden_layers": 3},
        {"partial_rotary_factor": 0.5},
    ],
    ids=lambda changes: ",".join(changes) or "as it is",
)
def test_numbers(changes: dict[str, Any], tmp_path: Path) -> None:
    check_numbers("qwen3_next", tmp_path, **changes)


def test_numbers_beyond_a_piece(tmp_path: Path) -> None:
    """Longer than what is computed at once of a delta net, in passes that begin anywhere."""
    write("qwen3_next", tmp_path)
    ids = tokens(count=150)
    theirs, engine = reference("qwen3_next", ids), open_engine(tmp_path)
    for chunks in ((64, 64, 22), (40, 50, 1, 59)):
        ours = torch.cat([logits for _, logits in read_all(engine, ids, chunks)])
        assert float((ours - theirs).abs().max()) < 1e-4


def test_sequences_side_by_side_are_the_sequences_alone(tmp_path: Path) -> None:
    """At positions whose pieces do not end together."""
    write("qwen3_next", tmp_path)
    engine = open_engine(tmp_path, max_batch=128, max_ubatch=128)
    texts = {engine.create(): tokens(seed, count) for seed, count in ((1, 110), (2, 97), (3, 73))}
    for seq, text in texts.items():
        engine.feed(seq, text[:-30])
    engine.advance({seq: text[-30:] for seq, text in texts.items()})
    for seq, text in texts.items():
        logits = engine.logits(seq)
        assert logits is not None
        assert float((logits - reference("qwen3_next", text)[-1]).abs().max()) < 1e-4


def test_the_hubs_older_words_mean_the_same(tmp_path: Path) -> None:
    """A period in place of a list of layers, and RoPE among the other fields."""
    write("qwen3_next", tmp_path)
    older = {"full_attention_interval": 4, "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    change_config(tmp_path, layer_types=..., rope_parameters=..., rope_scaling=None, **older)
    ours = torch.cat([logits for _, logits in read_all(open_engine(tmp_path), tokens(), [LENGTH])])
    assert float((ours - reference("qwen3_next", tokens())).abs().max()) < 1e-4


def test_quantized_rows_stay_near(tmp_path: Path) -> None:
    write("qwen3_next", tmp_path)
    engine = open_engine(tmp_path, type_k="q8_0", type_v="q8_0")
    ours = torch.cat([logits for _, logits in read_all(engine, tokens(), [40] + [1] * 24)])
    difference = (ours - reference("qwen3_next", tokens())).square().mean().sqrt()
    assert 1e-5 < float(difference) < 0.02


def test_refusals(tmp_path: Path) -> None:
    cases: dict[str, Any] = {
        "linear_num_value_heads": 3,
        "linear_num_key_heads": ...,
        "linear_value_head_dim": 0,
        "linear_conv_kernel_dim": 1,
        "layer_types": [LINEAR] * 4,
        "hidden_act": "gelu",
        "attention_bias": True,
        "num_experts_per_tok": 5,
        "mlp_only_layers": "none",
        "norm_topk_prob": "yes",
        "rope_parameters.partial_rotary_factor": 0.01,
        "quantization_config": {"bits": 4},
    }
    check_refusals("qwen3_next", tmp_path, cases)
