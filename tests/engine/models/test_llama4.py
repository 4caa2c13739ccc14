"""Llama 4 against transformers, and what of its configurations is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.cache.memory import KEYS
from engine.models.base import Placement
from engine.models.llama4 import Llama4, Temperature
from engine.weights.hub_names import HubWeights
from tests.oracles.base import check_numbers, write
from tests.oracles.older import check_full_pass, check_reworded
from tests.oracles.refusals import check_refusals
from tests.oracles.variants import nest

VARIATIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "one expert a token": {"num_experts_per_tok": 1, "interleave_moe_layer_step": 1},
    "listed experts": {"moe_layers": (0, 3)},
    "no experts": {"moe_layers": ()},
    "no norms": {"use_qk_norm": False},
    "one temperature": {"attn_temperature_tuning": False},
    "rope in all": {"no_rope_layers": (1, 1, 1, 1)},
    "rope in one": {"no_rope_layers": (0, 1, 0, 0)},
    "other chunks": {"layer_types": ("full_attention",) + ("chunked_attention",) * 3},
    "biases, tied": {"attention_bias": True, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_numbers(name: str, tmp_path: Path) -> None:
    # Logits of tied matrices are eight times as large.
    check_numbers("llama4", tmp_path, atol=2e-4 if "tied" in name else 1e-4, **VARIATIONS[name])


def test_text_model_of_a_larger_one(tmp_path: Path) -> None:
    write("llama4", tmp_path)
    nest(tmp_path, "language_model.model", "llama4")
    check_full_pass("llama4", tmp_path)


def test_files_that_say_no_kinds_of_layers(tmp_path: Path) -> None:
    words = {"layer_types": ..., "no_rope_layers": [], "moe_layers": ...}
    check_reworded("llama4", tmp_path, words)


def test_older_files_tune_by_a_number(tmp_path: Path) -> None:
    check_reworded("llama4", tmp_path, {"attn_temperature_tuning": 4})


def test_a_number_may_say_that_nothing_is_tuned(tmp_path: Path) -> None:
    check_reworded("llama4", tmp_path, {"attn_temperature_tuning": 0}, attn_temperature_tuning=False)


def test_a_shift_turns_rows_of_layers_with_rope_alone(tmp_path: Path) -> None:
    write("llama4", tmp_path)
    needs = Llama4(HubWeights(tmp_path), Placement(torch.float32, torch.device("cpu"), 256)).needs
    turned = [part.turned is not None for part in needs.parts if part.name == KEYS]
    assert turned == [True, True, True, False]


def test_refusals(tmp_path: Path) -> None:
    cases = {
        "quantization_config": {"bits": 4},
        "hidden_act": "gelu",
        "attention_chunk_size": ...,
        "num_local_experts": 0,
        "num_experts_per_tok": 5,
        "moe_layers": [4],
        "no_rope_layers": [1, 1, 0],
        "use_qk_norm": 1,
        "attn_temperature_tuning": "yes",
        "floor_scale": 0,
        "attn_scale": "0.1",
        "attention_bias": True,
        "layer_types": ["sliding_attention"] * 4,
    }
    check_refusals("llama4", tmp_path, cases)


def test_temperature_rises_at_every_multiple() -> None:
    positions = torch.tensor([0, 6, 7, 14, 15, 800])
    steps = torch.tensor([0.0, 0.0, 1.0, 1.0, 2.0, 100.0])
    expected = 1 + 0.5 * (1 + steps).log()
    torch.testing.assert_close(Temperature(8, 0.5).of(positions)[:, 0, 0], expected)
