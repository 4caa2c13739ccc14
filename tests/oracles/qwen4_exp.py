"""qwen4_exp: gated delta nets, attention over blocks that an indexer chooses, n-gram embeddings.

Half of the layers attend, with a budget of two blocks: a wrong choice moves every logit.
"""

from __future__ import annotations

from typing import Any

from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

from tests.engine.weights.folders import VOCAB
from tests.oracles.base import TOKEN_IDS
from tests.oracles.gdn import remembering
from tests.oracles.variants import lists


def make(**changes: Any) -> tuple[type, Qwen4ExpTextConfig]:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "hc_count": 2,
        "hc_lowrank": 8,
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [1, 3],
        "ple_embed_dim": 64,
        "ngram_size": 3,
        "heads_per_ngram": 4,
        "ngram_vocab_size_base": 512,
        "split_ngram_parts": 3,
        "make_ngram_vocab_size_divisible_by": 8,
        "max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [4, 2, 2],
        },
    }
    config = Qwen4ExpTextConfig(**{**sizes, **TOKEN_IDS, **lists(changes)})
    return remembering(Qwen4ExpForCausalLM), config
