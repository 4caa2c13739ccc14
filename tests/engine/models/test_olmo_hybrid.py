"""OLMo Hybrid against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import WeightsRefused
from engine.rope import Rotary
from tests.engine.reading import read_all
from tests.engine.weights.folders import change_config
from tests.oracles.base import LENGTH, check_numbers, open_engine, reference, tokens, write
from tests.oracles.refusals import check_refusals


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"positions": True},
        {"linear_allow_neg_eigval": False},
        {"tie_word_embeddings": True, "num_key_value_heads": 4},
        {"linear_num_key_heads": 4, "linear_key_head_dim": 16, "linear_conv_kernel_dim": 2},
    ],
    ids=lambda changes: ",".join(changes) or "as it is",
)
def test_numbers(changes: dict[str, Any], tmp_path: Path) -> None:
    check_numbers("olmo_hybrid", tmp_path, **changes)


@pytest.mark.parametrize("positions", [False, True])
def test_keys_turn_where_the_file_has_positions(positions: bool, tmp_path: Path) -> None:
    write("olmo_hybrid", tmp_path, positions=positions)
    turned = [part.turned for part in open_engine(tmp_path)._model.needs.parts if part.name == "kv.k"]
    assert [isinstance(one.rotary, Rotary) if one else False for one in turned] == [positions]


def test_the_older_word_for_positions_is_read(tmp_path: Path) -> None:
    write("olmo_hybrid", tmp_path, positions=True)
    change_config(tmp_path, rope_parameters=None, rope_theta=10000.0)
    ours = torch.cat([logits for _, logits in read_all(open_engine(tmp_path), tokens(), [LENGTH])])
    theirs = reference("olmo_hybrid", tokens(), positions=True)
    assert float((ours - theirs).abs().max()) < 1e-4


def test_a_base_of_null_means_no_positions_in_the_older_word_too(tmp_path: Path) -> None:
    write("olmo_hybrid", tmp_path)
    change_config(tmp_path, rope_parameters=None, rope_theta=None)
    ours = torch.cat([logits for _, logits in read_all(open_engine(tmp_path), tokens(), [LENGTH])])
    assert float((ours - reference("olmo_hybrid", tokens())).abs().max()) < 1e-4


@pytest.mark.parametrize("rope", [..., None, {"rope_type": "default"}], ids=str)
def test_a_file_must_say_whether_there_are_positions(rope: object, tmp_path: Path) -> None:
    write("olmo_hybrid", tmp_path)
    change_config(tmp_path, rope_parameters=rope)
    with pytest.raises(WeightsRefused, match="rope_theta"):
        open_engine(tmp_path)


def test_refusals(tmp_path: Path) -> None:
    cases: dict[str, Any] = {
        "linear_num_value_heads": 3,
        "linear_allow_neg_eigval": "no",
        "linear_conv_kernel_dim": ...,
        "attention_bias": True,
        "hidden_act": "gelu",
        "layer_types": ["linear_attention"] * 4,
        "num_key_value_heads": 3,
    }
    check_refusals("olmo_hybrid", tmp_path, cases)
