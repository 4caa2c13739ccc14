"""The parts that a model's memory is made of, in one line."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.state import Layout


def layout_line(layout: Layout) -> str:
    """The layers' parts of equal name and shape together: `30 × token kv.k bf16 (3, 64)`."""
    specs = sorted((spec.kind, _family(spec.name), spec.dtype, spec.shape) for spec in layout)
    groups = ((key, len(list(group))) for key, group in groupby(specs))
    return "; ".join(
        f"{count} × {kind} {name} {dtype} {shape}" for (kind, name, dtype, shape), count in groups
    )


def _family(part: str) -> str:
    return part.rstrip("0123456789").rstrip(".")
