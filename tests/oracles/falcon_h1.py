"""falcon_h1: attention and Mamba-2 in the same layer, every multiplier another number."""

from __future__ import annotations

from typing import Any

from transformers import FalconH1Config, FalconH1ForCausalLM

from tests.engine.weights.folders import VOCAB
from tests.oracles.base import TOKEN_IDS
from tests.oracles.variants import lists

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "mamba_d_ssm": 128,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
    "max_position_embeddings": 256,
}
_MULTIPLIERS = {
    "embedding_multiplier": 1.3,
    "lm_head_multiplier": 0.7,
    "mlp_multipliers": [0.8, 1.2],
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.4,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.1,
    "ssm_out_multiplier": 0.75,
    "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
}


def make(**changes: Any) -> tuple[type, FalconH1Config]:
    return FalconH1ForCausalLM, FalconH1Config(**{**_SIZES, **_MULTIPLIERS, **TOKEN_IDS, **lists(changes)})
