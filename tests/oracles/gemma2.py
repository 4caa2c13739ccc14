"""gemma2: soft caps, every other layer with a window. The caps are small enough to bend scores and logits."""

from __future__ import annotations

from typing import Any

from transformers import Gemma2Config, Gemma2ForCausalLM

from tests.engine.weights.folders import VOCAB
from tests.oracles.base import TOKEN_IDS
from tests.oracles.variants import lists


def make(**changes: Any) -> tuple[type, Gemma2Config]:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "query_pre_attn_scalar": 20,
        "sliding_window": 12,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
        "max_position_embeddings": 256,
    }
    return Gemma2ForCausalLM, Gemma2Config(**{**sizes, **TOKEN_IDS, **lists(changes)})
