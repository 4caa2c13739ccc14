"""qwen3_next: three gated delta nets to one gated attention, experts beside a shared one."""

from __future__ import annotations

from typing import Any

from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from tests.engine.weights.folders import VOCAB
from tests.oracles.base import TOKEN_IDS
from tests.oracles.gdn import remembering
from tests.oracles.variants import lists


def make(**changes: Any) -> tuple[type, Qwen3NextConfig]:
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
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 256,
    }
    return remembering(Qwen3NextForCausalLM), Qwen3NextConfig(**{**sizes, **TOKEN_IDS, **lists(changes)})
