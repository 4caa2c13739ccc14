"""Zamba2 against transformers. Logits have a deviation of 8, since the embedding is the output matrix too;
those of the reference are up to 3e-4 from its own in float64, and ours agree with them to 8e-4."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.state import PartKind, parts_of
from tests.engine.reading import read_all
from tests.oracles.base import LENGTH, build, check_numbers, open_engine, reference, tokens, write
from tests.oracles.refusals import check_refusals
from tests.oracles.stepwise import in_parts

ATOL = 8e-4
#: five places, of which each block has two or three
MANY = ("hybrid", "hybrid", "mamba", "hybrid", "hybrid", "hybrid")


def test_numbers(tmp_path: Path) -> None:
    check_numbers("zamba2", tmp_path, atol=ATOL)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_mem_rope": True},
        {"use_shared_attention_adapter": True},
        {
            "layers_block_type": MANY,
            "num_hidden_layers": 6,
            "num_mem_blocks": 2,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
        },
        {"mamba_ngroups": 2, "num_key_value_heads": 2},
        {"add_bias_linear": True},
        {"layers_block_type": ("mamba",) * 5},
    ],
    ids=str,
)
def test_numbers_of_variations(tmp_path: Path, changes: dict[str, Any]) -> None:
    check_numbers("zamba2", tmp_path, atol=ATOL, **changes)


def test_keys_are_kept_where_a_block_stands(tmp_path: Path) -> None:
    write("zamba2", tmp_path)
    kept = {part.layer for part in parts_of(open_engine(tmp_path).layout, PartKind.TOKEN)}
    assert kept == {1, 4}


def test_steps_are_bounded_by_the_limit_alone(tmp_path: Path) -> None:
    """With the usual time_step_min of 0.001 the reference's full pass is not what it computes token by token:
    there alone it bounds steps from below. Without that bound, as the model was trained, it is ours."""
    bounded = {"time_step_min": 1e-3}
    write("zamba2", tmp_path, **bounded)
    full, ids = reference("zamba2", tokens(), **bounded), tokens()
    assert (in_parts("zamba2", ids, (1,) * LENGTH, **bounded) - full).abs().max() > 0.01
    trained = copy.deepcopy(build("zamba2", **bounded))
    for module in trained.modules():
        if type(module).__name__ == "Zamba2MambaMixer":
            module.time_step_limit = (0.0, float("inf"))
    with torch.inference_mode():
        theirs = trained(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    ((_, ours),) = read_all(open_engine(tmp_path), ids, (LENGTH,))
    assert (ours - theirs).abs().max() < ATOL
    assert (ours - full).abs().max() > 0.01


def test_bad_configurations_are_refused_by_their_field(tmp_path: Path) -> None:
    cases: dict[str, Any] = {
        "layers_block_type": ["mamba"] * 4,
        "n_mamba_heads": 7,
        "mamba_headdim": 15,
        "mamba_ngroups": 3,
        "mamba_d_state": ...,
        "mamba_d_conv": 1,
        "hidden_act": "silu",
        "use_long_context": True,
        "tie_word_embeddings": False,
        "add_bias_linear": True,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
    }
    check_refusals("zamba2", tmp_path, cases)
