"""mamba2: state-space mixers alone."""

from __future__ import annotations

from typing import Any

from transformers import Mamba2Config, Mamba2ForCausalLM

from tests.engine.weights.folders import VOCAB
from tests.oracles.base import TOKEN_IDS


def make(**changes: Any) -> tuple[type, Mamba2Config]:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "state_size": 16,
        "num_hidden_layers": 3,
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 2,
        "chunk_size": 16,
    }
    return Mamba2ForCausalLM, Mamba2Config(**{**sizes, **TOKEN_IDS, **changes})
