"""GLM-5 against transformers, with every way of saying which layers choose; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import WeightsRefused
from tests.engine.models.latent import LOSS, check_index_keys_are_rotated, check_shift
from tests.oracles.base import check_numbers, open_engine, reference, tokens, write
from tests.oracles.deepseek_v3 import GROUPS, YARN
from tests.oracles.refusals import check_refusals

VARIATIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "every layer": {"indexer_types": ("full",) * 5},
    "the first alone": {"indexer_types": ("full", *("shared",) * 4)},
    "the last as well": {"indexer_types": ("full", "shared", "shared", "shared", "full")},
    "by letters": {"indexer_types": None, "index_topk_pattern": "FSFSS"},
    "every third": {"indexer_types": None, "index_topk_freq": 3, "index_skip_topk_offset": 1},
    "one row": {"index_topk": 1},
    "more rows than tokens": {"index_topk": 100},
    "groups": GROUPS,
    "biases": {"attention_bias": True},
    "yarn": {"rope": YARN},
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_numbers(name: str, tmp_path: Path) -> None:
    check_numbers("glm_moe_dsa", tmp_path, atol=2e-5, **VARIATIONS[name])


@pytest.mark.parametrize(
    ("words", "kinds"),
    [
        ({"index_topk_pattern": "FSSFS"}, ("full", "shared", "shared", "full", "shared")),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, ("full", "shared", "full", "shared", "full")),
        ({"index_topk_freq": 3}, ("full", "full", "shared", "shared", "full")),
    ],
    ids=["letters", "every second", "every third, from the second on"],
)
def test_the_words_of_released_files_mean_the_same(
    words: dict[str, Any], kinds: tuple[str, ...], tmp_path: Path
) -> None:
    write("glm_moe_dsa", tmp_path, indexer_types=kinds)
    path = tmp_path / "config.json"
    config = {**json.loads(path.read_text()), **words}
    del config["indexer_types"]
    path.write_text(json.dumps(config))
    engine, ids = open_engine(tmp_path), tokens()
    seq = engine.create()
    engine.feed(seq, ids)
    logits = engine.logits(seq)
    assert logits is not None
    theirs = reference("glm_moe_dsa", ids, indexer_types=kinds)[-1]
    torch.testing.assert_close(logits, theirs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("dtype", LOSS)
def test_shifted_rows_are_those_of_the_new_positions(dtype: str, tmp_path: Path) -> None:
    check_shift("glm_moe_dsa", tmp_path, dtype, ("kv.k", "idx.k"))


def test_index_keys_are_rotated_whatever_their_dtype(tmp_path: Path) -> None:
    check_index_keys_are_rotated("glm_moe_dsa", tmp_path)


def test_layers_that_share_a_choice_keep_no_index_keys(tmp_path: Path) -> None:
    write("glm_moe_dsa", tmp_path)
    names = {part.name for part in open_engine(tmp_path).layout}
    assert names == {f"kv.k.0{layer}" for layer in range(5)} | {"idx.k.00", "idx.k.03"}


def test_refusals(tmp_path: Path) -> None:
    cases = {
        "indexer_types": ["shared", "full", "full", "full", "full"],
        "q_lora_rank": None,
        "index_topk": ...,
        "layer_types": ["full_attention"] * 5,
        "mlp_bias": True,
        "n_group": 16,
    }
    check_refusals("glm_moe_dsa", tmp_path, cases)


@pytest.mark.parametrize("pattern", ["SFFFF", "FFF", "FXFFF", 5])
def test_patterns_that_make_no_sense_are_refused(pattern: object, tmp_path: Path) -> None:
    write("glm_moe_dsa", tmp_path)
    path = tmp_path / "config.json"
    changes = {"indexer_types": None, "index_topk_pattern": pattern}
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(WeightsRefused, match="index_topk_pattern"):
        open_engine(tmp_path)
