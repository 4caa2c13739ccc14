"""The reference token by token, where it is asked what it makes of its own cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from tests.oracles.base import build


def in_parts(
    family: str, ids: Sequence[int], parts: Sequence[int], cache_name: str = "past_key_values", **changes: Any
) -> torch.Tensor:
    """float32 [tokens, vocab]: `ids` in runs of `parts` tokens through one cache, which the model's forward
    calls `cache_name`. Positions are told to models that take any."""
    model = build(family, **changes)
    cache, out, start = DynamicCache(config=model.config), [], 0
    for count in parts:
        told: dict[str, Any] = {cache_name: cache, "use_cache": True}
        if cache_name == "past_key_values":
            told["position_ids"] = torch.arange(start, start + count)[None]
        with torch.inference_mode():
            out.append(model(input_ids=torch.tensor([list(ids[start : start + count])]), **told).logits[0])
        start += count
    return torch.cat(out)
