"""phi3: joined matrices, three quarters of a head turned, RoPE stretched by two tables."""

from __future__ import annotations

from typing import Any

from transformers import Phi3Config, Phi3ForCausalLM

from tests.engine.weights.folders import VOCAB
from tests.oracles.base import TOKEN_IDS
from tests.oracles.variants import lists

#: heads of 32 values, of which 24 turn
PAIRS = 12


def make(**changes: Any) -> tuple[type, Phi3Config]:
    """`original` is the context of the short table, which is 256 tokens or less of the 256 there are."""
    original = changes.pop("original", 256)
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": original,
        "short_factor": [1.0 + 0.1 * pair for pair in range(PAIRS)],
        "long_factor": [1.0 + 0.7 * pair for pair in range(PAIRS)],
    }
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "original_max_position_embeddings": original,
        "rope_parameters": {**rope, **dict(changes.pop("rope", ()))},
    }
    return Phi3ForCausalLM, Phi3Config(**{**sizes, **TOKEN_IDS, **lists(changes)})
