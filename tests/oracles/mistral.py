"""mistral: uniform sliding windows."""

from __future__ import annotations

from typing import Any

from transformers import MistralConfig, MistralForCausalLM

from tests.engine.weights.folders import VOCAB
from tests.oracles.base import TOKEN_IDS


def make(**changes: Any) -> tuple[type, MistralConfig]:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "sliding_window": 12,
    }
    return MistralForCausalLM, MistralConfig(**{**sizes, **TOKEN_IDS, **changes})
