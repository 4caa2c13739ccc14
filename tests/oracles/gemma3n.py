"""gemma3n: four streams, the last layers read rows of others, most gates of the first layers shut."""

from __future__ import annotations

from typing import Any

from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

from tests.engine.weights.folders import VOCAB
from tests.oracles.base import TOKEN_IDS
from tests.oracles.variants import lists


def make(**changes: Any) -> tuple[type, Gemma3nTextConfig]:
    sizes = {
        "vocab_size": VOCAB,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size": 64,
        "hidden_size_per_layer_input": 16,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "sliding_window": 12,
        "laurel_rank": 8,
        "final_logit_softcapping": 5.0,
        "max_position_embeddings": 256,
        "activation_sparsity_pattern": [0.8, 0.5, 0.0, 0.0, 0.0, 0.0],
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    }
    return Gemma3nForCausalLM, Gemma3nTextConfig(**{**sizes, **TOKEN_IDS, **lists(changes)})
