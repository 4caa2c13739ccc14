"""nemotron_h: one thing a layer: Mamba-2, attention without positions, a feed-forward, experts."""

from __future__ import annotations

from typing import Any

from transformers import NemotronHConfig, NemotronHForCausalLM

from tests.engine.weights.folders import VOCAB
from tests.oracles.base import TOKEN_IDS
from tests.oracles.variants import lists


def make(**changes: Any) -> tuple[type, NemotronHConfig]:
    """The reference bounds steps by time_step_min in some of its passes only; so small, it makes no
    difference."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "head_dim": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "layers_block_type": ["mamba", "mlp", "attention", "moe", "mamba", "mlp"],
        "ssm_state_size": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 80,
        "routed_scaling_factor": 1.5,
        "use_mamba_kernels": False,
        "time_step_min": 1e-9,
        "max_position_embeddings": 256,
    }
    return NemotronHForCausalLM, NemotronHConfig(**{**sizes, **TOKEN_IDS, **lists(changes)})
