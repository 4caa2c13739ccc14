"""lfm2: gated short convolutions, and one layer of attention unless `kinds` has none."""

from __future__ import annotations

from typing import Any

from transformers import Lfm2Config, Lfm2ForCausalLM

from tests.engine.weights.folders import VOCAB
from tests.oracles.base import TOKEN_IDS
from tests.oracles.variants import lists


def make(kinds: str = "conv conv full_attention conv", **changes: Any) -> tuple[type, Lfm2Config]:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": len(kinds.split()),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": False,
        "max_position_embeddings": 256,
        "layer_types": kinds.split(),
    }
    return Lfm2ForCausalLM, Lfm2Config(**{**sizes, **TOKEN_IDS, **lists(changes)})
