"""mimo_v2_flash: windows with sinks and twice the key heads, keys wider than values, experts."""

from __future__ import annotations

from typing import Any

from transformers.models.mimo_v2_flash import MiMoV2FlashConfig, MiMoV2FlashForCausalLM

from tests.engine.weights.folders import VOCAB
from tests.oracles.base import TOKEN_IDS
from tests.oracles.variants import lists

FULL, SLIDING = "full_attention", "sliding_attention"


def make(**changes: Any) -> tuple[type, MiMoV2FlashConfig]:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 96,
        "v_head_dim": 32,
        "sliding_window": 12,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 256,
        "layer_types": [FULL, SLIDING, SLIDING, FULL],
    }
    return MiMoV2FlashForCausalLM, MiMoV2FlashConfig(**{**sizes, **TOKEN_IDS, **lists(changes)})
