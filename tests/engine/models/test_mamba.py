"""Mamba against transformers. Differences are of float32: logits of deviation 8, since the embedding is
the output matrix too, agree to 5e-4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.oracles.base import LENGTH, SHAPES, check_numbers, reference, tokens, write
from tests.oracles.older import check_full_pass
from tests.oracles.refusals import check_refusals
from tests.oracles.stepwise import in_parts

ATOL = 1e-4


def test_numbers(tmp_path: Path) -> None:
    check_numbers("mamba", tmp_path, atol=ATOL)


@pytest.mark.parametrize(
    "changes",
    [
        {"state_size": 16, "time_step_rank": 7},
        {"intermediate_size": 96, "conv_kernel": 3},
        {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": False},
    ],
    ids=str,
)
def test_numbers_of_variations(tmp_path: Path, changes: dict[str, Any]) -> None:
    check_numbers("mamba", tmp_path, atol=ATOL, **changes)


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_the_embedding_may_have_its_first_name(family: str, tmp_path: Path) -> None:
    write(family, tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({name.replace("embeddings", "embedding"): x for name, x in load_file(path).items()}, path)
    check_full_pass(family, tmp_path, atol=ATOL)


def test_the_reference_begins_anew_with_every_run_of_tokens() -> None:
    """Why runs of tokens are compared with a full pass: through its own cache the reference goes on token by
    token, but a longer run starts from an empty state."""
    full = reference("mamba", tokens())
    one_by_one = in_parts("mamba", tokens(), (1,) * LENGTH, "cache_params")
    in_runs = in_parts("mamba", tokens(), SHAPES["irregular"], "cache_params")
    assert (one_by_one - full).abs().max() < ATOL
    assert (in_runs - full).abs().max() > 1


def test_bad_configurations_are_refused_by_their_field(tmp_path: Path) -> None:
    cases: dict[str, Any] = {
        "hidden_size": ...,
        "state_size": ...,
        "num_hidden_layers": 0,
        "conv_kernel": 1,
        "time_step_rank": "some",
        "hidden_act": "gelu",
        "use_bias": True,
        "use_conv_bias": False,
        "layer_norm_epsilon": 0,
    }
    check_refusals("mamba", tmp_path, cases)
