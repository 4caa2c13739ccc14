"""Layers of hybrids: attention or a state-space mixer mixes tokens, and a feed-forward may follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from engine.cache.memory import MemoryNeeds, PartNeed, PointSpec
from engine.linear import Linear
from engine.models.decoder import Pass
from engine.models.layers import Attention, RmsNorm
from engine.models.loading import Loader
from engine.models.moe import Experts
from engine.models.routing import Law
from engine.models.sizes import Sizes

#: x [tokens, width] in the model's dtype to the same shape
Mixing = Callable[[torch.Tensor, Pass], torch.Tensor]
Feeding = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Attends:
    """Attention as one way of mixing; without a `kind` of angles it has no positions."""

    attention: Attention
    kind: str | None

    def __call__(self, x: torch.Tensor, step: Pass) -> torch.Tensor:
        angles = None if self.kind is None else step.angles[self.kind]
        return self.attention(x, angles, step.view)


@dataclass(frozen=True, slots=True)
class MixingBlock:
    """x + residual * mixing(norm(x))."""

    norm: RmsNorm
    mixing: Mixing
    residual: float = 1.0

    def __call__(self, x: torch.Tensor, step: Pass) -> torch.Tensor:
        return x + self.mixing(self.norm(x).to(step.dtype), step).float() * self.residual


@dataclass(frozen=True, slots=True)
class FeedingBlock:
    """x + residual * ffn(norm(x))."""

    norm: RmsNorm
    ffn: Feeding
    residual: float = 1.0

    def __call__(self, x: torch.Tensor, step: Pass) -> torch.Tensor:
        return x + self.ffn(self.norm(x).to(step.dtype)).float() * self.residual


def load_embedding(load: Loader, sizes: Sizes) -> torch.Tensor:
    """That of a stack called `backbone`, whose first authors have it in the singular."""
    older = load.has("backbone.embedding.weight")
    name = "backbone.embedding.weight" if older else "backbone.embeddings.weight"
    return load.tensor(name, sizes.vocab_size, sizes.width)


@dataclass(frozen=True, slots=True)
class Routed:
    """A mixture of experts as a feed-forward."""

    router: Linear
    law: Law
    experts: Experts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        chosen, weights = self.law(self.router(x).float())
        return self.experts(x, chosen, weights)


def needs_of(parts: Iterable[PartNeed]) -> MemoryNeeds:
    """The kind of memory that parts of token rows and of point state make: hybrids may be all of one kind."""
    parts = tuple(parts)
    points = sum(isinstance(part, PointSpec) for part in parts)
    kind = "recurrent" if points == len(parts) else "hybrid" if points else "kv"
    return MemoryNeeds(kind, parts)
