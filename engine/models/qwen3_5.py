"""Qwen3.5 without experts: the layers of Qwen3-Next, each with a plain feed-forward (model card, 2026).

Text alone: RoPE over three axes is plain RoPE where all three are the token's position.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from engine.models.base import Placement, WeightSource
from engine.models.fields import Fields
from engine.models.gdn import DeltaSizes
from engine.models.layers import FeedForward
from engine.models.loading import Loader, hub_ffn
from engine.models.qwen3_next import DeltaDecoder


class Qwen35(DeltaDecoder):
    """See `Model`."""

    def __init__(self, weights: WeightSource, placement: Placement) -> None:
        super().__init__(weights, placement, _load_inputs, _load_ffn)


def _load_inputs(load: Loader, prefix: str, width: int, deltas: DeltaSizes) -> Sequence[torch.Tensor]:
    rows = {"qkv": deltas.channels, "z": deltas.v_width, "b": deltas.num_v_heads, "a": deltas.num_v_heads}
    return [load.tensor(f"{prefix}.in_proj_{name}.weight", count, width) for name, count in rows.items()]


def _load_ffn(load: Loader, fields: Fields, prefix: str, layer: int, width: int) -> FeedForward:
    return hub_ffn(load, prefix, width, fields.count("intermediate_size"), F.silu)
