"""deepseek_v4: a window alone, then blocks of 4 with an indexer, blocks of 16, and blocks of 4 again; the
first layers route by the token's id."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from tests.engine.weights.folders import VOCAB
from tests.oracles.base import TOKEN_IDS

WINDOW, SPARSE, HEAVY = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 32,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "sliding_window": 16,
    "o_groups": 2,
    "o_lora_rank": 16,
    # Fewer heads would make equal scores, between which the library chooses as its sort happens to go.
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 4,
    "hc_mult": 2,
    "max_position_embeddings": 256,
    "layer_types": (WINDOW, SPARSE, HEAVY, SPARSE),
    "mlp_layer_types": ("hash_moe", "hash_moe", "moe", "moe"),
}


class RoutedByToken(DeepseekV4ForCausalLM):
    """With tables that send tokens to different experts: the library's own are all zeros."""

    def __init__(self, config: DeepseekV4Config) -> None:
        super().__init__(config)
        generator = torch.Generator().manual_seed(5)
        for name, table in self.named_buffers():
            if name.endswith("tid2eid"):
                ranks = torch.rand((len(table), config.n_routed_experts), generator=generator).argsort(1)
                table.copy_(ranks[:, : table.shape[1]])


def make(
    sparse: int = 4, heavy: int = 16, yarn: bool = False, **changes: Any
) -> tuple[type, DeepseekV4Config]:
    """`sparse` and `heavy` are tokens a block. Lists come as tuples."""
    fields = {**SIZES, **TOKEN_IDS, "compress_rates": {SPARSE: sparse, HEAVY: heavy}, **changes}
    if yarn:
        fields["rope_parameters"] = {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 8.0,
            "beta_slow": 1.0,
        }
    lists = {name: list(value) for name, value in fields.items() if isinstance(value, tuple)}
    return RoutedByToken, DeepseekV4Config(**{**fields, **lists})
