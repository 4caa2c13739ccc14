"""zamba2: Mamba-2, and a transformer block that two places share."""

from __future__ import annotations

from typing import Any

from transformers import Zamba2Config, Zamba2ForCausalLM

from tests.engine.weights.folders import VOCAB
from tests.oracles.base import TOKEN_IDS
from tests.oracles.variants import lists


def make(**changes: Any) -> tuple[type, Zamba2Config]:
    """The reference bounds steps by time_step_min in some of its passes only; so small, it makes no
    difference."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 5,
        "layers_block_type": ["mamba", "hybrid", "mamba", "mamba", "hybrid"],
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_mamba_heads": 8,
        "mamba_d_state": 16,
        "mamba_ngroups": 1,
        "chunk_size": 16,
        "num_mem_blocks": 1,
        "adapter_rank": 8,
        "use_mamba_kernels": False,
        "time_step_min": 1e-9,
        "max_position_embeddings": 256,
    }
    return Zamba2ForCausalLM, Zamba2Config(**{**sizes, **TOKEN_IDS, **lists(changes)})
