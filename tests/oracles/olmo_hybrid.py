"""olmo_hybrid: three gated delta nets, whose states may turn about, to one layer of attention, as a rule
without positions."""

from __future__ import annotations

from typing import Any

from transformers import OlmoHybridConfig, OlmoHybridForCausalLM

from tests.engine.weights.folders import VOCAB
from tests.oracles.base import TOKEN_IDS
from tests.oracles.variants import lists


def make(positions: bool = False, **changes: Any) -> tuple[type, OlmoHybridConfig]:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        # As wide for keys as for values: transformers saves the joined convolution in three equal parts.
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 16,
        "max_position_embeddings": 256,
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0 if positions else None}
    return OlmoHybridForCausalLM, OlmoHybridConfig(
        rope_parameters=rope, **{**sizes, **TOKEN_IDS, **lists(changes)}
    )
