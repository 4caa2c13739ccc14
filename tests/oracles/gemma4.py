"""gemma4: wider heads in layers that see everything, the last layers read rows of others, an input of its
own for each layer."""

from __future__ import annotations

from typing import Any

from transformers.models.gemma4 import Gemma4ForCausalLM, Gemma4TextConfig

from tests.engine.weights.folders import VOCAB
from tests.oracles.base import TOKEN_IDS
from tests.oracles.variants import lists


def make(**changes: Any) -> tuple[type, Gemma4TextConfig]:
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
        "global_head_dim": 64,
        "sliding_window": 12,
        "final_logit_softcapping": 5.0,
        "max_position_embeddings": 256,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    }
    return Gemma4ForCausalLM, Gemma4TextConfig(**{**sizes, **TOKEN_IDS, **lists(changes)})
