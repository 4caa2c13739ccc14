"""What rows and point state must be, before they are put into a memory of some parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.cache.points import Frozen
from engine.errors import StateError
from engine.state import Layout, PartKind, Point, Run


def check_runs(kind: PartKind, runs: Sequence[Run], length: int, latest: int) -> int:
    """The first position that `runs` cover. Raises StateError unless they are consecutive, begin at `latest`
    or before, and end at `length`."""
    at = runs[0].start if runs else length
    if at > latest:
        raise StateError(f"{kind} rows are needed from {latest} on, and there are none before {at}")
    first = at
    for run in runs:
        if run.start != at or run.stop < run.start:
            raise StateError(f"{kind} rows [{run.start}, {run.stop}) do not follow those up to {at}")
        at = run.stop
    if at != length:
        raise StateError(f"{kind} rows end at {at}, and there are {length} tokens")
    return first


def check_rows(specs: Layout, run: Run, read: Sequence[torch.Tensor]) -> None:
    """Raises StateError unless there are as many rows of every part as `run` is of. `specs` are those of its
    kind."""
    if len(read) != len(specs):
        raise StateError(f"{run.kind} rows have {len(read)} parts, not {len(specs)}")
    for spec, stored in zip(specs, read, strict=True):
        shape = (spec.num_rows(run.start, run.stop), spec.row_nbytes)
        if stored.dtype != torch.uint8 or tuple(stored.shape) != shape:
            raise StateError(f"part {spec.name}: {stored.dtype} {tuple(stored.shape)}, not {shape}")


def check_points(specs: Layout, points: Sequence[Point], length: int) -> dict[int, Frozen]:
    """The point states by position. Raises StateError unless each has the parts that `specs` say, they come
    in order, within the state, and one is of its end where there are tokens."""
    if points and not specs:
        raise StateError("the state has point parts, which this memory has not")
    frozen: dict[int, Frozen] = {}
    last = 0
    for point in points:
        if not last < point.position <= length:
            raise StateError(f"point state at {point.position} of {length} tokens, behind that at {last}")
        last = point.position
        if len(point.parts) != len(specs):
            raise StateError(f"point state has {len(point.parts)} parts, not {len(specs)}")
        for spec, stored in zip(specs, point.parts, strict=True):
            if stored.dtype != torch.uint8 or tuple(stored.shape) != (spec.row_nbytes,):
                raise StateError(f"part {spec.name}: {stored.dtype} {tuple(stored.shape)} at one position")
        frozen[point.position] = point.parts
    if specs and length and length not in frozen:
        raise StateError(f"the state has {length} tokens, and no point state at their end")
    return frozen
