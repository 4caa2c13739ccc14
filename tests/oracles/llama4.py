"""llama4: three layers in chunks with RoPE to one that sees everything without, experts in every other."""

from __future__ import annotations

from typing import Any

from transformers import Llama4ForCausalLM, Llama4TextConfig

from tests.engine.weights.folders import VOCAB
from tests.oracles.base import TOKEN_IDS
from tests.oracles.variants import lists


def make(**changes: Any) -> tuple[type, Llama4TextConfig]:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 64,
        "intermediate_size_mlp": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 12,
        "no_rope_layer_interval": 4,
        "floor_scale": 8,
        "attn_scale": 0.5,
        "max_position_embeddings": 256,
    }
    return Llama4ForCausalLM, Llama4TextConfig(**{**sizes, **TOKEN_IDS, **lists(changes)})
