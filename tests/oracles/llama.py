"""llama: full attention with grouped heads."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

from tests.engine.weights.folders import VOCAB
from tests.oracles.base import TOKEN_IDS


def make(**changes: Any) -> tuple[type, LlamaConfig]:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
    }
    return LlamaForCausalLM, LlamaConfig(**{**sizes, **TOKEN_IDS, **changes})
