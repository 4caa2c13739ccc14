"""qwen3_5: three gated delta nets to one gated attention, dense."""

from __future__ import annotations

from typing import Any

from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from tests.engine.weights.folders import VOCAB
from tests.oracles.base import TOKEN_IDS
from tests.oracles.gdn import remembering
from tests.oracles.variants import lists

ROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}


def make(**changes: Any) -> tuple[type, Qwen3_5TextConfig]:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "max_position_embeddings": 256,
        "rope_parameters": ROPE,
    }
    return remembering(Qwen3_5ForCausalLM), Qwen3_5TextConfig(**{**sizes, **TOKEN_IDS, **lists(changes)})
