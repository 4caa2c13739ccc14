"""qwen4_exp within a model that also sees; it is only given text."""

from __future__ import annotations

from typing import Any

from transformers import Qwen4ExpConfig, Qwen4ExpForConditionalGeneration

from tests.oracles import qwen4_exp
from tests.oracles.gdn import remembering

_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 32,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}


def make(**changes: Any) -> tuple[type, Qwen4ExpConfig]:
    _, text = qwen4_exp.make(**changes)
    config = Qwen4ExpConfig(text_config=text.to_dict(), vision_config=_VISION, image_token_id=290)
    return remembering(Qwen4ExpForConditionalGeneration), config
