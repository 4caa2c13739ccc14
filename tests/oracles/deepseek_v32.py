"""deepseek_v32: latent attention to the rows that an indexer chooses, fewer than a window of text has.

Sixteen heads of the indexer: with few of them scores of nothing but zeros tie, and a library chooses among
them as it likes.
"""

from __future__ import annotations

from typing import Any

from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

from tests.oracles.deepseek_v3 import DECODER, GROUPS, LATENT, changed

INDEX = {"index_n_heads": 16, "index_head_dim": 96, "index_topk": 8}


def make(**changes: Any) -> tuple[type, DeepseekV32Config]:
    config = DeepseekV32Config(**changed(LATENT, DECODER, GROUPS, INDEX, **changes))
    return DeepseekV32ForCausalLM, config
