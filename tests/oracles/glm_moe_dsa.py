"""glm_moe_dsa: indexers in some layers, whose choice the layers behind them share."""

from __future__ import annotations

from typing import Any

from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

from tests.oracles.deepseek_v3 import DECODER, LATENT, changed
from tests.oracles.deepseek_v32 import INDEX

SIZES = {"num_hidden_layers": 5, "indexer_types": ("full", "shared", "shared", "full", "shared")}


def make(**changes: Any) -> tuple[type, GlmMoeDsaConfig]:
    return GlmMoeDsaForCausalLM, GlmMoeDsaConfig(**changed(LATENT, DECODER, INDEX, SIZES, **changes))
