"""bamba: Mamba-2 with one layer of attention."""

from __future__ import annotations

from typing import Any

from transformers import BambaConfig, BambaForCausalLM

from tests.engine.weights.folders import VOCAB
from tests.oracles.base import TOKEN_IDS
from tests.oracles.variants import lists


def make(**changes: Any) -> tuple[type, BambaConfig]:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
        "max_position_embeddings": 256,
    }
    return BambaForCausalLM, BambaConfig(**{**sizes, **TOKEN_IDS, **lists(changes)})
