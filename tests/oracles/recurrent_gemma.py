"""recurrent_gemma: two linear recurrences to one layer of attention with a window, twice."""

from __future__ import annotations

from typing import Any

from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

from tests.engine.weights.folders import VOCAB
from tests.oracles.base import TOKEN_IDS
from tests.oracles.variants import lists


def make(**changes: Any) -> tuple[type, RecurrentGemmaConfig]:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "lru_width": 96,
        "attention_window_size": 12,
    }
    return RecurrentGemmaForCausalLM, RecurrentGemmaConfig(**{**sizes, **TOKEN_IDS, **lists(changes)})
