"""What conversions of a state's rows have cost (docs/format.md, section 5.6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.errors import Corrupt, UnknownFeature
from engine.state import DTYPES
from serialization.limits import MAX_KEY, MAX_LABEL_NBYTES, MAX_LOSSES, MAX_PARTS, MAX_TOKENS
from serialization.records import exactly, integer, items, real, text

#: the feature that a manifest of a state with converted rows needs
REENCODED = "reencoded"


@dataclass(frozen=True, slots=True)
class PartLoss:
    """What one part lost from dtype `before` to `after`, as measured: `greatest` is the largest relative
    error of a row (the length of its difference by its own), `mean_square` the sum of all squared differences
    by that of all squared values."""

    name: str
    layer: int
    before: str
    after: str
    greatest: float
    mean_square: float

    @property
    def is_exact(self) -> bool:
        return self.greatest == 0

    def record(self) -> list[object]:
        return [self.name, self.layer, self.before, self.after, self.greatest, self.mean_square]


@dataclass(frozen=True, slots=True)
class Loss:
    """One conversion, of a state that had `length` tokens then. Which rows are what it left is said by the
    spans."""

    length: int
    parts: tuple[PartLoss, ...]

    @property
    def is_exact(self) -> bool:
        """Whether every value is what it was."""
        return all(part.is_exact for part in self.parts)

    def record(self) -> list[object]:
        return [self.length, [part.record() for part in self.parts]]


def read_losses(value: Any) -> tuple[Loss, ...]:
    """Raises Corrupt, UnknownFeature (a dtype) or LimitExceeded."""
    losses = tuple(_read_loss(item) for item in items(value, MAX_LOSSES, "reencoded"))
    if not losses:
        raise Corrupt("reencoded: of nothing")
    return losses


def _read_loss(value: Any) -> Loss:
    length, parts = exactly(value, 2, "reencoded")
    read = tuple(_read_part(item) for item in items(parts, MAX_PARTS, "reencoded"))
    if not read:
        raise Corrupt("reencoded: a conversion of no part")
    return Loss(integer(length, MAX_TOKENS, "reencoded"), read)


def _read_part(value: Any) -> PartLoss:
    name, layer, before, after, greatest, mean_square = exactly(value, 6, "reencoded")
    for dtype in (before, after):
        if text(dtype, MAX_KEY, "reencoded") not in DTYPES:
            raise UnknownFeature(f"rows of an unknown dtype: {dtype!r}")
    part = PartLoss(
        text(name, MAX_LABEL_NBYTES, "reencoded"),
        integer(layer, MAX_PARTS, "reencoded"),
        before,
        after,
        real(greatest, "reencoded"),
        real(mean_square, "reencoded"),
    )
    if part.greatest < 0 or part.mean_square < 0 or (part.greatest == 0) != (part.mean_square == 0):
        raise Corrupt("reencoded: a loss that cannot be")
    return part
