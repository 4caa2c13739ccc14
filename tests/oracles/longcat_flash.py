"""longcat_flash: blocks of two latent attentions, and experts of which some give back what they get."""

from __future__ import annotations

from typing import Any

from transformers import LongcatFlashConfig, LongcatFlashForCausalLM

from tests.engine.weights.folders import VOCAB
from tests.oracles.deepseek_v3 import LATENT, changed

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 32,
    "num_layers": 2,
    "head_dim": LATENT["qk_rope_head_dim"],
    "moe_topk": 3,
    "n_routed_experts": 6,
    "zero_expert_num": 4,
    "max_position_embeddings": 256,
}


def make(**changes: Any) -> tuple[type, LongcatFlashConfig]:
    return LongcatFlashForCausalLM, LongcatFlashConfig(**changed(LATENT, SIZES, **changes))
