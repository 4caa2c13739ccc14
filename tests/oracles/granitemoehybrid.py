"""granitemoehybrid: Mamba-2 and attention without positions, experts in every layer."""

from __future__ import annotations

from typing import Any

from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

from tests.engine.weights.folders import VOCAB
from tests.oracles.base import TOKEN_IDS
from tests.oracles.variants import lists


def make(**changes: Any) -> tuple[type, GraniteMoeHybridConfig]:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 48,
        "shared_intermediate_size": 80,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
        "max_position_embeddings": 256,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 1.3,
        "residual_multiplier": 0.7,
        "logits_scaling": 1.5,
    }
    config = GraniteMoeHybridConfig(**{**sizes, **TOKEN_IDS, **lists(changes)})
    return GraniteMoeHybridForCausalLM, config
