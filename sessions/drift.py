"""How far two computations of the same values are apart."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from engine.cache.quant import decode
from engine.cache.rows import PLAIN
from engine.state import PartSpec


@dataclass(frozen=True, slots=True)
class Drift:
    """|differences| of `num_values` pairs: the largest and the mean, not a number where one of a pair is
    none; `num_differing` are not the same bits."""

    max: float = 0.0
    mean: float = 0.0
    num_values: int = 0
    num_differing: int = 0

    def __add__(self, other: Drift) -> Drift:
        count = self.num_values + other.num_values
        if not count:
            return self
        total = self.mean * self.num_values + other.mean * other.num_values
        largest = math.nan if math.isnan(self.max + other.max) else max(self.max, other.max)
        return Drift(largest, total / count, count, self.num_differing + other.num_differing)

    def within(self, limit: float) -> bool:
        """False where anything is not a number, too."""
        return self.max <= limit


def drift_of(a: torch.Tensor, b: torch.Tensor) -> Drift:
    """Of two tensors of one shape. Values that are equal, infinite ones too, are no difference."""
    if not a.numel():
        return Drift()
    a, b = a.double(), b.double()
    apart = torch.where(a == b, 0.0, (a - b).abs())
    return Drift(float(apart.max()), float(apart.mean()), a.numel(), int((a != b).sum()))


def row_drift(spec: PartSpec, a: torch.Tensor, b: torch.Tensor) -> Drift:
    """Of rows as they are stored: uint8 [rows, row bytes] each."""
    return drift_of(_values(spec, a), _values(spec, b))


def _values(spec: PartSpec, stored: torch.Tensor) -> torch.Tensor:
    stored = stored.cpu().contiguous()
    if spec.dtype in PLAIN:
        return stored.view(PLAIN[spec.dtype])
    if spec.dtype == "i64":
        return stored.view(torch.int64)
    return decode(spec.dtype, stored, torch.float32)
