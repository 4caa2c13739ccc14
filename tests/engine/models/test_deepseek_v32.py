"""DeepSeek-V3.2 against transformers; its rows when they move; and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.models.latent import LOSS, check_index_keys_are_rotated, check_shift
from tests.oracles.base import check_numbers, open_engine, reference, tokens, write
from tests.oracles.deepseek_v3 import YARN
from tests.oracles.refusals import check_refusals

VARIATIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "one row": {"index_topk": 1},
    "most rows": {"index_topk": 60},
    "as many rows as tokens": {"index_topk": 64},
    "more rows than tokens": {"index_topk": 2048},
    "every value of an index key turns": {"index_head_dim": 64},
    "many heads": {"index_n_heads": 40},
    "biases": {"attention_bias": True},
    "one group": {"n_group": 1, "topk_group": 1},
    "dense and sparse by name": {"mlp_layer_types": ("sparse", "dense", "sparse")},
    "yarn": {"rope": YARN},
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_numbers(name: str, tmp_path: Path) -> None:
    check_numbers("deepseek_v32", tmp_path, atol=2e-5, **VARIATIONS[name])


def test_the_choice_decides() -> None:
    ids = tokens()
    few, all_of_them = reference("deepseek_v32", ids), reference("deepseek_v32", ids, index_topk=64)
    assert torch.equal(few[:8], all_of_them[:8])
    assert (few[8:] - all_of_them[8:]).abs().amax(-1).min() > 0.01


@pytest.mark.parametrize("dtype", LOSS)
def test_shifted_rows_are_those_of_the_new_positions(dtype: str, tmp_path: Path) -> None:
    check_shift("deepseek_v32", tmp_path, dtype, ("kv.k", "idx.k"))


def test_index_keys_are_rotated_whatever_their_dtype(tmp_path: Path) -> None:
    check_index_keys_are_rotated("deepseek_v32", tmp_path)


def test_rows_of_two_parts(tmp_path: Path) -> None:
    write("deepseek_v32", tmp_path)
    assert {(part.name, part.shape) for part in open_engine(tmp_path).layout} == {
        (f"{name}.{layer:02}", (1, size))
        for layer in range(3)
        for name, size in (("kv.k", 128), ("idx.k", 96))
    }


def test_several_sequences_choose_each_for_itself(tmp_path: Path) -> None:
    write("deepseek_v32", tmp_path)
    engine = open_engine(tmp_path)
    texts = [tokens(seed, count) for seed, count in ((1, 50), (2, 9), (3, 4))]
    seqs = [engine.create() for _ in texts]
    for seq, text in zip(seqs, texts, strict=True):
        engine.feed(seq, text[:-1])
    engine.advance({seq: text[-1:] for seq, text in zip(seqs, texts, strict=True)})
    for seq, text in zip(seqs, texts, strict=True):
        logits = engine.logits(seq)
        assert logits is not None
        torch.testing.assert_close(logits, reference("deepseek_v32", text)[-1], atol=2e-5, rtol=0)


def test_refusals(tmp_path: Path) -> None:
    cases = {
        "q_lora_rank": None,
        "index_topk": 0,
        "index_n_heads": ...,
        "index_head_dim": 65,
        "indexer_rope_interleave": True,
        "rope_interleave": False,
        "layer_types": ["indexed_attention", "full_attention", "indexed_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "mlp_bias": True,
        "attention_bias": True,
        "num_key_value_heads": 1,
        "rope_parameters.rope_type": "dynamic",
    }
    check_refusals("deepseek_v32", tmp_path, cases)


def test_an_index_key_that_is_shorter_than_what_turns_is_refused(tmp_path: Path) -> None:
    check_refusals("deepseek_v32", tmp_path, {"index_head_dim": 32})


def test_meaning_has_every_number_that_rows_depend_on(tmp_path: Path) -> None:
    write("deepseek_v32", tmp_path)
    meaning = open_engine(tmp_path).fingerprint.meaning
    for name in ("index_topk", "index_head_dim", "index_n_heads", "kv_lora_rank"):
        assert any(key.endswith(f"config.{name}") for key in meaning), name
