"""dots3_note: indexed layers and sliding ones, each kind of its own sizes."""

from __future__ import annotations

from typing import Any

from transformers import Dots3NoteForCausalLM, Dots3NoteTextConfig

from tests.oracles.deepseek_v3 import DECODER, LATENT, changed
from tests.oracles.deepseek_v32 import INDEX

SIZES = {
    "head_dim": 80,
    "num_hidden_layers": 5,
    "layer_types": (
        "indexed_attention",
        "sliding_attention",
        "sliding_attention",
        "indexed_attention",
        "sliding_attention",
    ),
    "sliding_window": 12,
    "shared_experts_intermediate_size": 24,
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 2,
    "swa_q_lora_rank": 24,
    "swa_kv_lora_rank": 32,
    "swa_head_dim": 56,
    "swa_qk_nope_head_dim": 24,
    "swa_v_head_dim": 20,
}


def make(**changes: Any) -> tuple[type, Dots3NoteTextConfig]:
    config = Dots3NoteTextConfig(**changed(LATENT, DECODER, INDEX, SIZES, **changes))
    return Dots3NoteForCausalLM, config
