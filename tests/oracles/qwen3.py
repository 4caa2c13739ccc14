"""qwen3: full attention, norms on the heads of q and k."""

from __future__ import annotations

from typing import Any

from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.engine.weights.folders import VOCAB
from tests.oracles.base import TOKEN_IDS


def make(**changes: Any) -> tuple[type, Qwen3Config]:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "head_dim": 32,
    }
    return Qwen3ForCausalLM, Qwen3Config(**{**sizes, **TOKEN_IDS, **changes})
