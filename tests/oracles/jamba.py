"""jamba: Mamba, one layer of attention without positions, experts in every other layer."""

from __future__ import annotations

from typing import Any

from transformers import JambaConfig, JambaForCausalLM

from tests.engine.weights.folders import VOCAB
from tests.oracles.base import TOKEN_IDS


def make(**changes: Any) -> tuple[type, JambaConfig]:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
        "max_position_embeddings": 256,
    }
    return JambaForCausalLM, JambaConfig(**{**sizes, **TOKEN_IDS, **changes})
