"""cohere2: three layers with windows and RoPE to one that has neither, a parallel block, scaled logits."""

from __future__ import annotations

from typing import Any

from transformers import Cohere2Config, Cohere2ForCausalLM

from tests.engine.weights.folders import VOCAB
from tests.oracles.base import TOKEN_IDS
from tests.oracles.variants import lists


def make(**changes: Any) -> tuple[type, Cohere2Config]:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "sliding_window": 12,
        "logit_scale": 0.125,
        "max_position_embeddings": 256,
    }
    return Cohere2ForCausalLM, Cohere2Config(**{**sizes, **TOKEN_IDS, **lists(changes)})
