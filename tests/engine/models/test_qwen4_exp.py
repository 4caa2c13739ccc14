"""Qwen4-Exp with random weights computes what transformers computes, and notices whatever decides it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.batch import Batch
from engine.cache import hybrid_idx
from engine.errors import WeightsRefused
from engine.runner import Engine
from tests.engine.reading import read_all
from tests.engine.weights.folders import change_config
from tests.oracles.base import SHAPES, check_numbers, open_engine, reference, tokens, write
from tests.oracles.refusals import check_refusals

FAMILY = "qwen4_exp"
ATOL = 1e-5
LINEAR, INDEXED, FULL = "linear_attention", "indexed_attention", "full_attention"


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one block of five": {"indexer_compress_ratio": 5, "indexer_budget": 5},
    "blocks of two": {"indexer_compress_ratio": 2, "indexer_budget": 12, "indexer_head_dim": 64},
    "everything is read": {"indexer_budget": 64},
    "indexers in a row": {"layer_types": (INDEXED, LINEAR, INDEXED, INDEXED), "ple_layer_ids": (2,)},
    "files' own word": {"layer_types": (LINEAR, LINEAR, LINEAR, FULL), "output_gate_type": "sigmoid"},
    "no attention": {"layer_types": (LINEAR,) * 4, "ple_layer_ids": None},
    "longer n-grams": {"ngram_size": 4, "heads_per_ngram": 2, "ple_embed_dim": 96, "ple_conv_kernel_size": 3},
    "four streams": {"hc_count": 4, "hc_lowrank": 20},
    "tied": {"norm_topk_prob": False, "tie_word_embeddings": True},
    "two heads": {"num_attention_heads": 2, "head_dim": 64, "eos_token_id": (257, 258)},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_the_references(variant: str, tmp_path: Path) -> None:
    check_numbers(FAMILY, tmp_path, ATOL, **VARIANTS[variant])


def test_the_text_model_of_one_that_sees_is_read(tmp_path: Path) -> None:
    check_numbers("qwen4_exp_vl", tmp_path, ATOL)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp(FAMILY)
    write(FAMILY, folder)
    return open_engine(folder)


def read(engine: Engine, ids: list[int], shape: str = "irregular") -> torch.Tensor:
    return torch.cat([logits for _, logits in read_all(engine, ids, SHAPES[shape])])


@pytest.mark.parametrize("shape", SHAPES)
def test_ends_of_text_hide_what_was_before_them(shape: str, engine: Engine) -> None:
    """At the cuts between passes too."""
    ids = tokens()
    for at in (0, 12, 13, 14, 20, 39, 41, 42, 43):
        ids[at] = 257
    difference = (read(engine, ids, shape) - reference(FAMILY, ids)).abs().max()
    assert difference <= ATOL


def all_closed(scores: torch.Tensor, positions: torch.Tensor, block: int, most: int) -> torch.Tensor:
    return PICK(scores, positions, block, scores.shape[1])


def the_worst(scores: torch.Tensor, positions: torch.Tensor, block: int, most: int) -> torch.Tensor:
    return PICK(-scores, positions, block, most)


def one_fewer(scores: torch.Tensor, positions: torch.Tensor, block: int, most: int) -> torch.Tensor:
    return PICK(scores, positions, block, most - 1)


def a_token_late(scores: torch.Tensor, positions: torch.Tensor, block: int, most: int) -> torch.Tensor:
    return PICK(scores, positions - 1, block, most)


PICK = hybrid_idx.pick_blocks


@pytest.mark.parametrize("wrong", [all_closed, the_worst, one_fewer, a_token_late])
def test_another_choice_would_be_noticed(wrong: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the numbers above would prove nothing of the indexer."""
    monkeypatch.setattr(hybrid_idx, "pick_blocks", wrong)
    assert (read(engine, tokens()) - reference(FAMILY, tokens())).abs().max() > 0.1


def test_sequences_side_by_side_are_as_alone(engine: Engine) -> None:
    """Their blocks close at different tokens of a pass."""
    texts = [tokens(1), tokens(2), tokens(3)]
    seqs = [engine.create() for _ in texts]
    lengths = [0, 0, 0]
    rows: list[list[torch.Tensor]] = [[], [], []]
    for counts in ((5, 0, 2), (7, 7, 7), (1, 1, 1), (0, 9, 3), (6, 6, 6)):
        ends = [at + count for at, count in zip(lengths, counts, strict=True)]
        feed = [(row, at) for row in range(3) for at in range(lengths[row], ends[row])]
        batch = Batch(
            tokens=np.array([texts[row][at] for row, at in feed]),
            positions=np.array([at for _, at in feed]),
            seqs=np.array([seqs[row] for row, _ in feed]),
            outputs=np.ones(len(feed), np.bool_),
        )
        plan = engine._memory.plan(batch)
        for index, ubatch in enumerate(plan.ubatches):
            with torch.inference_mode():
                logits = engine._model.forward(
                    torch.from_numpy(ubatch.tokens),
                    torch.from_numpy(ubatch.positions),
                    plan.apply(index),
                    torch.arange(len(ubatch)),
                )
            for seq, line in zip(ubatch.batch.seqs[ubatch.rows], logits, strict=True):
                rows[seqs.index(seq)].append(line)
        plan.commit()
        lengths = ends
    for seq, text, lines in zip(seqs, texts, rows, strict=True):
        engine._slots.discard(seq)
        expected = reference(FAMILY, text)[: len(lines)]
        assert (torch.stack(lines) - expected).abs().max() <= ATOL


def test_configurations_that_are_not_supported_are_refused(tmp_path: Path) -> None:
    check_refusals(
        FAMILY,
        tmp_path,
        {
            "hidden_act": "gelu",
            "attention_bias": True,
            "layer_types": ["linear_attention", "sliding_attention"] * 2,
            "output_gate_type": "tanh",
            "hc_count": 1,
            "hc_lowrank": 0,
            "indexer_n_heads": None,
            "indexer_kv_heads": 2,
            "indexer_head_dim": 8,
            "indexer_budget": 10,
            "indexer_compress_ratio": 1,
            "num_experts_per_tok": 5,
            "ple_layer_ids": [2],
            "ple_embed_dim": 60,
            "ngram_size": 1,
            "ple_conv_kernel_size": 1,
            "linear_num_value_heads": 3,
            "rope_parameters.partial_rotary_factor": 0.01,
        },
    )


@pytest.mark.parametrize("changes", [{"eos_token_id": []}, {"eos_token_id": None}])
def test_embeddings_of_ngrams_need_an_end_of_text(changes: dict[str, Any], tmp_path: Path) -> None:
    write(FAMILY, tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(WeightsRefused, match="eos_token_id"):
        open_engine(tmp_path)


def test_tables_that_were_hashed_in_another_way_are_refused(tmp_path: Path) -> None:
    write(FAMILY, tmp_path)
    change_config(tmp_path, seed=1)
    with pytest.raises(WeightsRefused, match="layer_multipliers"):
        open_engine(tmp_path)


def test_a_table_may_be_in_one_piece(tmp_path: Path) -> None:
    """And without what it was hashed with, which the configuration says too."""
    write(FAMILY, tmp_path)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    for layer in (0, 2):
        prefix = f"model.layers.{layer}.ple.ple_embedding"
        shards = [stored.pop(f"{prefix}.ngram_embedding.shard_{number}.weight") for number in range(3)]
        stored[f"{prefix}.ngram_embedding.weight"] = torch.cat(shards)
        for name in ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"):
            del stored[f"{prefix}.{name}"]
    save_file(stored, path)
    theirs = reference(FAMILY, tokens())
    assert (read(open_engine(tmp_path), tokens()) - theirs).abs().max() <= ATOL
