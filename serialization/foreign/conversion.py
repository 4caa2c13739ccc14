"""What became of a state on its way from one system to another: kept, converted, dropped, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from serialization.foreign.foreign_state import Tensor
from serialization.foreign.forms import Form


class Fate(StrEnum):
    """What became of something that a state had."""

    KEPT = "kept"  # every number, perhaps in another order
    CONVERTED = "converted"  # numbers written down otherwise
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class Change:
    """`what` for people, and `why`. `loss` is the relative error (root mean square) of what was converted;
    0.0 where no number changed."""

    fate: Fate
    what: str
    why: str = ""
    loss: float = 0.0


@dataclass(frozen=True, slots=True)
class Conversion:
    """What became of every part of a state, and of what came with it."""

    changes: tuple[Change, ...]

    @property
    def exact(self) -> bool:
        """Whether every row came through without a number changed."""
        return self.loss == 0.0

    @property
    def loss(self) -> float:
        """The largest of the losses; not a number where one is not."""
        losses = [change.loss for change in self.changes]
        return math.nan if any(map(math.isnan, losses)) else max(losses, default=0.0)

    def of(self, fate: Fate) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.fate is fate)


class Report:
    """Gathers what became of rows; layers that fared alike are told together."""

    def __init__(self) -> None:
        self._rows: dict[tuple[Tensor, str], list[float]] = {}

    def add(self, tensor: Tensor, source: Form, target: Form, loss: float) -> None:
        """The rows of one layer."""
        self._rows.setdefault((tensor, _steps(source, target)), []).append(loss)

    def conversion(self, others: Sequence[Change] = ()) -> Conversion:
        rows = (_change(tensor, why, losses) for (tensor, why), losses in self._rows.items())
        return Conversion((*rows, *others))


def _change(tensor: Tensor, why: str, losses: Sequence[float]) -> Change:
    fate = Fate.KEPT if why in ("", _REORDERED) else Fate.CONVERTED
    what = f"{_NAMES[tensor]} of {len(losses)} layer{'s' if len(losses) > 1 else ''}"
    return Change(fate, what, why, math.nan if any(map(math.isnan, losses)) else max(losses))


_NAMES = {
    Tensor.KEYS: "keys",
    Tensor.VALUES: "values",
    Tensor.CONV: "inputs of convolutions",
    Tensor.STATE: "states",
}
_REORDERED = "RoPE's pairs in another order"


def _steps(source: Form, target: Form) -> str:
    steps = []
    if source.dtype != target.dtype:
        steps.append(f"{source.dtype} to {target.dtype}")
    if source.turns_pairs != target.turns_pairs:
        steps.append(_REORDERED)
        if source.shares_scales or target.shares_scales:
            steps.append("and new scales for that")
    if source.block != target.block:
        if source.block:
            steps.append(f"rotation of every {source.block} values undone")
        if target.block:
            steps.append(f"every {target.block} values rotated")
    return ", ".join(steps)
