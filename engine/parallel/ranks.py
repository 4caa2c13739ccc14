"""What the layers of a model know of the other ranks: their own share, and how products add up."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.linear import Linear
from engine.parallel.share import Share


class Ranks(Protocol):
    """The ranks that hold one model together, as one of them sees it."""

    @property
    def share(self) -> Share: ...

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's `x`, of one shape and dtype, in float32.

        Every rank calls it at the same place, and gets the same bits: terms are added in the order of ranks,
        so that those of a row do not depend on what else is in `x`. Raises RankLost.
        """
        ...


class Alone:
    """One rank that has everything. A total is the term."""

    @property
    def share(self) -> Share:
        return Share()

    def total(self, x: torch.Tensor) -> torch.Tensor:
        return x


ALONE = Alone()


class Summed:
    """A product whose columns the ranks share: each multiplies by its own, and the results add up.

    `x` [tokens, this rank's columns] to [tokens, out], in x's dtype. The bias is added once, to the sum.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, ranks: Ranks) -> None:
        self._part = Linear(weight)
        self._bias = bias
        self._ranks = ranks

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        total = self._ranks.total(self._part(x))
        return (total if self._bias is None else total + self._bias).to(x.dtype)


def once(x: torch.Tensor, share: Share) -> torch.Tensor:
    """`x` on rank 0 and nothing on the others: a term of a total that counts once."""
    return x if share.rank == 0 else torch.zeros_like(x)
