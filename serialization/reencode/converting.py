"""Rows of one dtype as those of another, and what that costs, measured part by part."""

from __future__ import annotations

import torch

from engine.errors import ConfigError
from engine.state import PartSpec
from serialization.hadamard import rotate
from serialization.losses import PartLoss
from serialization.values import decode, encode


class PartConverter:
    """Converts the rows of one part, `before` to `after`, and adds up what is lost.

    A loss is measured where the rows were, in the basis they were stored in: what they are read as now
    against what the new ones would be read as there. Rows that are rotated on both sides alike are never
    turned back.
    """

    def __init__(self, before: PartSpec, after: PartSpec, blocks: tuple[int, int]) -> None:
        """`blocks`: how many values were, and are to be, rotated together; 0 for none."""
        self._old = before
        self._new = after
        self._blocks = blocks
        self._num_rows = 0
        self._greatest = 0.0
        self._difference = 0.0
        self._size = 0.0

    def convert(self, rows: torch.Tensor) -> torch.Tensor:
        """uint8 [rows, row_nbytes] of the new part. Raises ConfigError where the new dtype has no such
        values."""
        if not len(rows):
            return rows.new_empty((0, self._new.row_nbytes))
        values = decode(self._old.dtype, rows)
        made = encode(self._new.dtype, self._turned(values, self._blocks))
        again = decode(self._new.dtype, made)
        self._measure(values, self._turned(again, self._blocks[::-1]))
        return made

    @property
    def is_used(self) -> bool:
        """Whether there were any rows."""
        return self._num_rows > 0

    @property
    def loss(self) -> PartLoss:
        """Of all that was converted so far."""
        old, mean_square = self._old, self._difference / self._size if self._size else 0.0
        return PartLoss(old.name, old.layer, old.dtype, self._new.dtype, self._greatest, mean_square)

    def _turned(self, values: torch.Tensor, blocks: tuple[int, int]) -> torch.Tensor:
        """From one basis to another."""
        before, after = blocks
        if before == after:
            return values
        heads = values.view(len(values), -1, self._old.shape[-1])
        return rotate(rotate(heads, before), after).view(values.shape)

    def _measure(self, values: torch.Tensor, again: torch.Tensor) -> None:
        self._num_rows += len(values)
        wide = values.double()
        difference = (again.double() - wide).square().sum(1)
        size = wide.square().sum(1)
        if not bool(torch.isfinite(difference).all()):
            raise ConfigError(f"part {self._new.name}: it has values that are none of {self._new.dtype}")
        worst = torch.where(difference > 0, difference / size, 0.0).amax()
        self._greatest = max(self._greatest, float(worst.sqrt()))
        self._difference += float(difference.sum())
        self._size += float(size.sum())
