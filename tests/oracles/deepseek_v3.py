"""deepseek_v3: latent attention, and experts in groups that a bias balances."""

from __future__ import annotations

from typing import Any

from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from tests.engine.weights.folders import VOCAB
from tests.oracles.base import TOKEN_IDS

#: of a latent attention, with rows of 128 values of which the first 64 are a latent
LATENT = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 64,
    "v_head_dim": 12,
}

#: of its decoders: a dense layer first, then experts
DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
}

GROUPS = {"n_group": 4, "topk_group": 2}

#: as in DeepSeek's own files, for four times the context
YARN = (
    ("rope_type", "yarn"),
    ("rope_theta", 10000.0),
    ("factor", 4.0),
    ("beta_fast", 32),
    ("beta_slow", 1),
    ("mscale", 1.0),
    ("mscale_all_dim", 1.0),
    ("original_max_position_embeddings", 64),
)


def changed(*sizes: dict[str, Any], rope: tuple[tuple[str, Any], ...] = (), **changes: Any) -> dict[str, Any]:
    """Fields of a configuration; `rope` are the pairs of its rope_parameters."""
    given = {"rope_parameters": dict(rope)} if rope else {}
    merged: dict[str, Any] = {}
    for part in (*sizes, TOKEN_IDS, given, changes):
        merged |= {name: list(value) if isinstance(value, tuple) else value for name, value in part.items()}
    return merged


def make(**changes: Any) -> tuple[type, DeepseekV3Config]:
    return DeepseekV3ForCausalLM, DeepseekV3Config(**changed(LATENT, DECODER, GROUPS, **changes))
