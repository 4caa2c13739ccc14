"""deepseek_v2: latent attention, and experts whose shares are probabilities."""

from __future__ import annotations

from typing import Any

from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

from tests.oracles.deepseek_v3 import DECODER, LATENT, changed


def make(**changes: Any) -> tuple[type, DeepseekV2Config]:
    return DeepseekV2ForCausalLM, DeepseekV2Config(**changed(LATENT, DECODER, **changes))
