"""mamba: selective state-space mixers alone."""

from __future__ import annotations

from typing import Any

from transformers import MambaConfig, MambaForCausalLM

from tests.engine.weights.folders import VOCAB
from tests.oracles.base import TOKEN_IDS


def make(**changes: Any) -> tuple[type, MambaConfig]:
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "state_size": 8, "num_hidden_layers": 3}
    return MambaForCausalLM, MambaConfig(**{**sizes, **TOKEN_IDS, **changes})
