"""gpt_oss: sinks in every layer, every other one with a window, YaRN, experts with clamped gates."""

from __future__ import annotations

from typing import Any

from transformers import GptOssConfig, GptOssForCausalLM

from tests.engine.weights.folders import VOCAB
from tests.oracles.base import TOKEN_IDS
from tests.oracles.variants import lists

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}


def make(**changes: Any) -> tuple[type, GptOssConfig]:
    """`rope` changes some of its parameters, as pairs of a name and a value."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "sliding_window": 12,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 256,
        "rope_parameters": {**YARN, **dict(changes.pop("rope", ()))},
    }
    return GptOssForCausalLM, GptOssConfig(**{**sizes, **TOKEN_IDS, **lists(changes)})
