"""gemma3: sliding windows and full attention interleaved."""

from __future__ import annotations

from typing import Any

from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from tests.engine.weights.folders import VOCAB
from tests.oracles.base import TOKEN_IDS


def make(**changes: Any) -> tuple[type, Gemma3TextConfig]:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "query_pre_attn_scalar": 20,
        "sliding_window": 12,
        "max_position_embeddings": 256,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    return Gemma3ForCausalLM, Gemma3TextConfig(**{**sizes, **TOKEN_IDS, **changes})
