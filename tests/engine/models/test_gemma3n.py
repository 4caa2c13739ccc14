"""Gemma 3n against transformers, and what of its configurations is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.base import Placement
from engine.models.gemma3n import Gemma3n
from engine.models.gemma3n_blocks import SparseGelu
from engine.weights.hub_names import HubWeights
from tests.oracles.base import check_numbers, write
from tests.oracles.older import check_full_pass, check_reworded
from tests.oracles.refusals import check_refusals
from tests.oracles.variants import nest

VARIATIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "rows of their own": {"num_kv_shared_layers": 0},
    "another stream": {"altup_active_idx": 1, "altup_num_inputs": 3},
    "no output scale": {"altup_correct_scale": False},
    "no gate shut": {"activation_sparsity_pattern": (0.0,) * 6},
    "widths": {"intermediate_size": (32, 64, 96, 64, 32, 96)},
    "fewer ids for layers": {"vocab_size_per_layer_input": 200},
    "biases, untied": {"attention_bias": True, "tie_word_embeddings": False},
    "no window": {"layer_types": ("full_attention",) * 6},
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_numbers(name: str, tmp_path: Path) -> None:
    check_numbers("gemma3n", tmp_path, **VARIATIONS[name])


def test_text_model_of_a_larger_one(tmp_path: Path) -> None:
    write("gemma3n", tmp_path)
    nest(tmp_path, "model.language_model", "gemma3n")
    check_full_pass("gemma3n", tmp_path)


def test_older_files_have_bases_of_their_own(tmp_path: Path) -> None:
    words = {"rope_parameters": ..., "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    check_reworded("gemma3n", tmp_path, words)


def test_files_that_say_least(tmp_path: Path) -> None:
    """Twelve layers, of which the first ten have shut gates and every fifth sees everything."""
    kinds = tuple("full_attention" if layer in (4, 9) else "sliding_attention" for layer in range(12))
    changes = {"layer_types": kinds, "num_hidden_layers": 12, "activation_sparsity_pattern": None}
    words = {"layer_types": ..., "activation_sparsity_pattern": ..., "intermediate_size": 96}
    # In float32 the reference itself is 4e-4 away from what it computes in float64.
    check_reworded("gemma3n", tmp_path, words, atol=1e-3, **changes)


def test_shared_layers_keep_no_rows(tmp_path: Path) -> None:
    write("gemma3n", tmp_path)
    model = Gemma3n(HubWeights(tmp_path), Placement(torch.float32, torch.device("cpu"), 256))
    assert {part.layer for part in model.needs.parts} == {0, 1, 2}
    assert model.sources == (0, 1, 2, 1, 1, 2)


def test_gates_below_the_cut_are_shut() -> None:
    gates = torch.randn(3, 4096, generator=torch.Generator().manual_seed(0)) * 5 + 2
    shut = (SparseGelu(1.0)(gates) == 0).float().mean(-1)
    torch.testing.assert_close(shut, torch.full((3,), 0.8413), atol=0.02, rtol=0)


def test_refusals(tmp_path: Path) -> None:
    cases = {
        "quantization_config": {"bits": 4},
        "hidden_activation": "silu",
        "num_kv_shared_layers": 5,
        "altup_active_idx": 4,
        "altup_num_inputs": 0,
        "intermediate_size": [96] * 5,
        "activation_sparsity_pattern": [0.0] * 5 + [1.0],
        "laurel_rank": "8",
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": ...,
        "final_logit_softcapping": ...,
        "attention_bias": True,
        "sliding_window": 0,
    }
    check_refusals("gemma3n", tmp_path, cases)
