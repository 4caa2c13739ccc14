"""Which experts a token goes to, and how much of each it takes: the laws of the families.

A law maps the router's logits, float32 [tokens, experts], to the numbers of the chosen experts and the
weights of their outputs, both [tokens, k].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

#: logits to (chosen, weights)
Law = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Groups:
    """Experts stand in `count` groups of equal size, one after the other; a token goes to experts of the
    `allowed` best groups. A group's score is the sum of its `scored` best experts."""

    count: int = 1
    allowed: int = 1
    scored: int = 1

    def shut(self, scores: torch.Tensor, value: float) -> torch.Tensor:
        """`scores` [tokens, experts] with `value` in place of those of groups that are not allowed."""
        if self.allowed == self.count:
            return scores
        grouped = scores.view(len(scores), self.count, -1)
        best = grouped.topk(self.scored, -1).values.sum(-1).topk(self.allowed).indices
        closed = torch.ones(grouped.shape[:2], dtype=torch.bool, device=scores.device).scatter_(
            1, best, False
        )
        return grouped.masked_fill(closed[:, :, None], value).flatten(1)


@dataclass(frozen=True, slots=True)
class BiasedSigmoid:
    """Sigmoids are the weights; with a bias added, which balances the load, they choose (DeepSeek-V3
    technical report, sections 2.1.2 and 2.1.3). `bias` is float32 [experts]."""

    bias: torch.Tensor
    groups: Groups
    num_chosen: int
    normalised: bool
    scale: float

    def __call__(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = logits.sigmoid()
        open_ones = self.groups.shut(scores + self.bias, float("-inf"))
        chosen = open_ones.topk(self.num_chosen).indices
        weights = scores.gather(1, chosen)
        if self.normalised:
            weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
        return chosen, weights * self.scale


@dataclass(frozen=True, slots=True)
class Softmax:
    """Probabilities over all experts choose and are the weights, not made to add up to 1 again (DeepSeek-V2,
    section 2.2)."""

    groups: Groups
    num_chosen: int
    scale: float

    def __call__(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Probabilities are positive, so that a shut group comes last.
        weights, chosen = self.groups.shut(logits.softmax(-1), 0.0).topk(self.num_chosen)
        return chosen, weights * self.scale


@dataclass(frozen=True, slots=True)
class BiasedSoftmax:
    """Probabilities over all experts are the weights; with a bias added they choose (LongCat-Flash technical
    report, section 2.1.1). `bias` is float32 [experts]."""

    bias: torch.Tensor
    num_chosen: int
    scale: float

    def __call__(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = logits.softmax(-1)
        chosen = (scores + self.bias).topk(self.num_chosen).indices
        return chosen, scores.gather(1, chosen) * self.scale
