"""Rows of a memory cut along their heads, and put together again.

The layout of a state is that of the whole model, however many ranks there were: a row of a part whose heads
are divided is the ranks' rows one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.cache.memory import MemoryNeeds, PartNeed, RowsSpec
from engine.errors import StateError
from engine.parallel.share import Share
from engine.state import Layout, PartKind, PartSpec, Point, Rows, parts_of


def local_needs(needs: MemoryNeeds, share: Share) -> MemoryNeeds:
    """What one rank has to remember: every part, with its own heads of those that are divided. They may be
    none of them; rows are empty then."""
    return MemoryNeeds(needs.kind, tuple(_local(need, share) for need in needs.parts))


def _local(need: PartNeed, share: Share) -> PartNeed:
    if isinstance(need, RowsSpec) and need.split:
        return replace(need, heads=len(share.of(need.heads)))
    return need


@dataclass(frozen=True, slots=True)
class Slices:
    """How the rows of `layout`, the whole model's, lie among `size` ranks. `split` has the parts whose heads
    are divided, by name."""

    layout: Layout
    split: frozenset[str]
    size: int

    @classmethod
    def of(cls, local: Layout, needs: MemoryNeeds, size: int) -> Slices:
        """Of a rank's own layout, and of what the whole model needs."""
        divided = {
            (need.name, need.layer): (need.heads, need.size)
            for need in needs.parts
            if isinstance(need, RowsSpec) and need.split
        }
        layout, split = [], set()
        for spec in local:
            shape = divided.get((spec.name.rsplit(".", 1)[0], spec.layer))
            if shape is not None:
                split.add(spec.name)
                spec = replace(spec, shape=shape)
            layout.append(spec)
        return cls(tuple(layout), frozenset(split), size)

    def columns(self, spec: PartSpec, rank: int) -> slice | None:
        """Which bytes of a row of the whole part are `rank`'s; None for a part that every rank has."""
        if spec.name not in self.split:
            return None
        heads, nbytes = Share(rank, self.size).of(spec.shape[0]), spec.row_nbytes // spec.shape[0]
        return slice(heads.start * nbytes, heads.stop * nbytes)

    def nbytes(self, spec: PartSpec, rank: int) -> int:
        """Of a row of the whole part that `rank` has; all, of one that is not divided."""
        mine = self.columns(spec, rank)
        return spec.row_nbytes if mine is None else mine.stop - mine.start

    def cut(self, rows: Sequence[Rows], rank: int) -> tuple[Rows, ...]:
        """`rank`'s part of whole rows, which were checked."""
        return tuple(replace(run, parts=self._cut_parts(run, rank)) for run in rows)

    def _cut_parts(self, run: Rows, rank: int) -> tuple[torch.Tensor, ...]:
        out = []
        for spec, part in zip(parts_of(self.layout, run.kind), run.parts, strict=True):
            mine = self.columns(spec, rank)
            out.append(part if mine is None else part[:, mine].contiguous())
        return tuple(out)

    def check(self, rows: Sequence[Rows], points: Sequence[Point]) -> None:
        """Raises StateError unless they have the shapes of the layout, so that they can be cut and sent. That
        they follow each other is the memory's to check."""
        for run in rows:
            specs = parts_of(self.layout, run.kind)
            if run.kind is PartKind.POINT or not 0 <= run.start <= run.stop or len(run.parts) != len(specs):
                raise StateError(f"{run.kind} rows [{run.start}, {run.stop}) are none of this memory's")
            for spec, part in zip(specs, run.parts, strict=True):
                _check(spec, part, (spec.num_rows(run.start, run.stop), spec.row_nbytes))
        specs = parts_of(self.layout, PartKind.POINT)
        for point in points:
            if len(point.parts) != len(specs):
                raise StateError(f"point state has {len(point.parts)} parts, not {len(specs)}")
            for spec, part in zip(specs, point.parts, strict=True):
                _check(spec, part, (spec.row_nbytes,))


def _check(spec: PartSpec, part: torch.Tensor, shape: tuple[int, ...]) -> None:
    if part.dtype != torch.uint8 or tuple(part.shape) != shape:
        raise StateError(f"part {spec.name}: {part.dtype} {tuple(part.shape)}, not {shape}")
