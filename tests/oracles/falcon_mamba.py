"""falcon_mamba: Mamba with norms without weights inside."""

from __future__ import annotations

from typing import Any

from transformers import FalconMambaConfig, FalconMambaForCausalLM

from tests.engine.weights.folders import VOCAB
from tests.oracles.base import TOKEN_IDS


def make(**changes: Any) -> tuple[type, FalconMambaConfig]:
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "state_size": 8, "num_hidden_layers": 3}
    return FalconMambaForCausalLM, FalconMambaConfig(**{**sizes, **TOKEN_IDS, **changes})
