"""minimax_m3: a dense layer, then two whose tokens are chosen in blocks of 4."""

from __future__ import annotations

from typing import Any

from transformers.models.minimax_m3_vl import MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

from tests.engine.weights.folders import VOCAB
from tests.oracles.base import TOKEN_IDS

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 32,
    "dense_intermediate_size": 128,
    "shared_intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rotary_dim": 16,
    # The library goes by this one alone.
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_block_size": 4,
    "index_topk_blocks": 3,
    "index_local_blocks": 1,
    "max_position_embeddings": 256,
}
LAYERS = {
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}


def make(**changes: Any) -> tuple[type, MiniMaxM3VLTextConfig]:
    """Lists come as tuples."""
    fields = {**SIZES, **LAYERS, **TOKEN_IDS, **changes}
    lists = {name: list(value) for name, value in fields.items() if isinstance(value, tuple)}
    return MiniMaxM3VLForCausalLM, MiniMaxM3VLTextConfig(**{**fields, **lists})
