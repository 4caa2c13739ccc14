"""Nemotron-H against transformers. Differences are of float32: at most 1e-4 at logits of deviation 1."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.reading import read_all
from tests.engine.weights.folders import change_config
from tests.oracles.base import LENGTH, build, check_numbers, open_engine, reference, tokens, write
from tests.oracles.refusals import check_refusals
from tests.oracles.stepwise import in_parts


def test_numbers(tmp_path: Path) -> None:
    check_numbers("nemotron_h", tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"n_group": 2, "topk_group": 1, "norm_topk_prob": False},
        {"moe_latent_size": 32},
        {"n_groups": 1, "conv_kernel": 3, "use_bias": True, "use_conv_bias": False},
        {"layers_block_type": ("mamba", "moe")},
        {"layers_block_type": ("attention", "mlp")},
        {"mlp_bias": True},
    ],
    ids=str,
)
def test_numbers_of_variations(tmp_path: Path, changes: dict[str, Any]) -> None:
    check_numbers("nemotron_h", tmp_path, **changes)


def test_older_files_have_a_letter_for_each_layer(tmp_path: Path) -> None:
    write("nemotron_h", tmp_path)
    change_config(tmp_path, layers_block_type=..., hybrid_override_pattern="M-*EM-", num_hidden_layers=6)
    ((_, ours),) = read_all(open_engine(tmp_path), tokens(), (64,))
    assert (ours - reference("nemotron_h", tokens())).abs().max() < 1e-4


def test_steps_are_bounded_by_the_limit_alone(tmp_path: Path) -> None:
    """With the usual time_step_min of 0.001 the reference's full pass is not what it computes token by token:
    there alone it bounds steps from below. Without that bound, as the published model is, it is ours."""
    bounded = {"time_step_min": 1e-3}
    write("nemotron_h", tmp_path, **bounded)
    full, ids = reference("nemotron_h", tokens(), **bounded), tokens()
    assert (in_parts("nemotron_h", ids, (1,) * LENGTH, **bounded) - full).abs().max() > 1e-3
    published = copy.deepcopy(build("nemotron_h", **bounded))
    for layer in published.model.layers:
        if layer.block_type == "linear_attention":
            layer.mixer.time_step_limit = published.config.time_step_limit
    with torch.inference_mode():
        theirs = published(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    ((_, ours),) = read_all(open_engine(tmp_path), ids, (LENGTH,))
    assert (ours - theirs).abs().max() < 1e-4
    assert (ours - full).abs().max() > 1e-3


def test_bad_configurations_are_refused_by_their_field(tmp_path: Path) -> None:
    cases: dict[str, Any] = {
        "layers_block_type": ["mamba", "nothing"],
        "mamba_num_heads": ...,
        "n_groups": 3,
        "ssm_state_size": 0,
        "conv_kernel": 1,
        "mamba_hidden_act": "gelu",
        "mlp_hidden_act": "silu",
        "sliding_window": 16,
        "use_bias": True,
        "attention_bias": True,
        "mlp_bias": True,
        "num_key_value_heads": 3,
        "n_group": 3,
        "tie_word_embeddings": True,
        "num_experts_per_tok": 9,
    }
    check_refusals("nemotron_h", tmp_path, cases)
