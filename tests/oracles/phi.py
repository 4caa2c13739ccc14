"""phi: a parallel block with biases everywhere, half of a head turned."""

from __future__ import annotations

from typing import Any

from transformers import PhiConfig, PhiForCausalLM

from tests.engine.weights.folders import VOCAB
from tests.oracles.base import TOKEN_IDS
from tests.oracles.variants import lists


def make(**changes: Any) -> tuple[type, PhiConfig]:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    return PhiForCausalLM, PhiConfig(**{**sizes, **TOKEN_IDS, **lists(changes)})
