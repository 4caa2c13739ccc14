"""The two shapes that most blocks have: one half after the other, or both side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.models.decoder import Pass
from engine.models.layers import Attention, LayerNorm, RmsNorm

#: [tokens, width] in the model's dtype to the same in any
Ffn = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class SerialBlock:
    """x + attention(norm x), then x + ffn(norm x). Layers of a `kind` without angles have no positions."""

    kind: str
    attention_norm: RmsNorm | LayerNorm
    attention: Attention
    ffn_norm: RmsNorm | LayerNorm
    ffn: Ffn

    def __call__(self, x: torch.Tensor, step: Pass) -> torch.Tensor:
        h = self.attention_norm(x).to(step.dtype)
        x = x + self.attention(h, step.angles.get(self.kind), step.view)
        return x + self.ffn(self.ffn_norm(x).to(step.dtype))


@dataclass(frozen=True, slots=True)
class ParallelBlock:
    """x + attention(norm x) + ffn(norm x). Layers of a `kind` without angles have no positions."""

    kind: str
    norm: RmsNorm | LayerNorm
    attention: Attention
    ffn: Ffn

    def __call__(self, x: torch.Tensor, step: Pass) -> torch.Tensor:
        h = self.norm(x).to(step.dtype)
        return x + self.attention(h, step.angles.get(self.kind), step.view) + self.ffn(h)
