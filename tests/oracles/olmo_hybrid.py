"""olmo_hybrid: three gated delta nets, whose states may turn about, to one layer of attention."""

from __future__ import annotations

from typing import Any

from transformers import OlmoHybridConfig, OlmoHybridForCausalLM

from tests.engine.weights.folders import VOCAB
from tests.oracles.base import TOKEN_IDS


def make(**changes: Any) -> tuple[type, OlmoHybridConfig]:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        # As wide for keys as for values: transformers saves the joined convolution in three equal parts.
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 16,
        "max_position_embeddings": 256,
    }
    return OlmoHybridForCausalLM, OlmoHybridConfig(**{**sizes, **TOKEN_IDS, **changes})
