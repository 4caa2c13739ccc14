"""The rows of a foreign state as a memory of ours stores them.

Where dtype, order and rotation are the same on both sides they come through bit for bit, and `outward.py`
makes the same foreign rows of them again. What had to be changed or left is said in a `Conversion`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.errors import Corrupt, FingerprintMismatch, Unsupported
from engine.state import PartKind, PartSpec, Point, Rows, parts_of
from serialization.foreign.conversion import Change, Conversion, Fate, Report
from serialization.foreign.foreign_state import (
    ForeignCells,
    ForeignRows,
    ForeignState,
    Ints,
    Rotation,
    Tensor,
    ValueOrder,
)
from serialization.foreign.forms import Form, move
from serialization.foreign.geometry import CacheRole, Geometry, Pairing
from serialization.foreign.target import Place, Target, foreign_form, layer_of, own_form, place_of

#: window rows that are taken beyond those that going on needs: the last tokens can be computed again from
#: them
SPARE_ROWS = 16


@dataclass(frozen=True, slots=True)
class Converted:
    """Rows of the first `length` tokens by a target's layout: token rows from 0 on, window rows at least
    from where going on at `length` needs them. `dtypes` are those that they had; `points` has recurrent
    state at `length`, where it could be had. The first `unseen` window rows are zeros: the state has none
    there, memory asks for them, and no token from `length` on sees them."""

    length: int
    rows: tuple[Rows, ...]
    points: tuple[Point, ...]
    conversion: Conversion
    dtypes: frozenset[str]
    unseen: int = 0

    @property
    def window_start(self) -> int:
        """The first token that all parts have a row of."""
        windows = [rows.start + self.unseen for rows in self.rows if rows.kind is PartKind.WINDOW]
        return max(windows, default=0)


def to_rows(
    state: ForeignState, geometry: Geometry, target: Target, rotation: Rotation | None = None
) -> Converted:
    """The rows of `state` as `target` stores them. `rotation` says it where the state does not.

    Raises Corrupt where positions are missing or there twice, FingerprintMismatch where layers or sizes are
    not the target's, Unsupported for a part that no foreign state has an equivalent of, or a rotation that
    nobody told.
    """
    if parts_of(target.layout, PartKind.BLOCK):
        raise Unsupported("block rows have no equivalent in a foreign state; its token ids can be read anew")
    length = state.length
    sources = _Sources(state, geometry, state.rotation if rotation is None else rotation)
    report = Report()
    rows, unseen = [], 0
    for kind in (PartKind.TOKEN, PartKind.WINDOW):
        specs = parts_of(target.layout, kind)
        if specs and length:
            start = _start(kind, specs, sources, length)
            before = max(0, start - _needed(specs, length)) if kind is PartKind.WINDOW else 0
            unseen += before
            parts = []
            for spec in specs:
                form, data = sources.rows(spec, start, length)
                own = own_form(spec, geometry, target)
                moved = move(data, form, own)
                report.add(place_of(spec).tensor, form, own, moved.loss)
                zeros = moved.data.new_zeros((before, moved.data.shape[1]))
                parts.append(torch.cat((zeros, moved.data)) if before else moved.data)
            rows.append(Rows(kind, start - before, length, tuple(parts)))
    points = _points(state, target)
    others = [Change(Fate.KEPT, "recurrent state")] if points else []
    return Converted(
        length, tuple(rows), points, report.conversion([*others, *sources.left()]), sources.dtypes, unseen
    )


def _start(kind: PartKind, specs: tuple[PartSpec, ...], sources: _Sources, length: int) -> int:
    """Where rows of a kind begin: where all its parts have them, but no more than are of use."""
    there = max(sources.run(spec).start for spec in specs)
    if kind is PartKind.TOKEN:
        if there:
            raise Corrupt(f"rows are needed of every token, and there are none before {there:,}")
        return 0
    needed = _needed(specs, length)
    # One fewer is enough: the oldest row of a window is one that only the last token saw. transformers keeps
    # no more.
    if there > needed + (length >= _window(specs)):
        raise Corrupt(f"window rows are needed from token {needed:,} on, and there are none before {there:,}")
    return max(there, needed - SPARE_ROWS)


def _needed(specs: tuple[PartSpec, ...], length: int) -> int:
    """The first window row that a memory of `length` tokens has."""
    return max(0, length - _window(specs))


def _window(specs: tuple[PartSpec, ...]) -> int:
    return max(spec.window or 0 for spec in specs)


@dataclass(frozen=True, slots=True)
class _Run:
    """Cells of one cache that lead to the end without a hole: `order` picks those of positions [start,
    ...)."""

    start: int
    order: Ints


class _Sources:
    """The tensors of a foreign state by their place, each cache's cells in the order of positions."""

    def __init__(self, state: ForeignState, geometry: Geometry, rotation: Rotation) -> None:
        self._state = state
        self._geometry = geometry
        self._rotation = rotation
        self._runs = [_run(cells, state.length) for cells in state.caches]
        self._tensors: dict[Place, tuple[int, ForeignRows]] = {}
        for index, cells in enumerate(state.caches):
            for rows in cells.rows:
                place = Place(rows.layer, rows.tensor, cells.role is CacheRole.INDEX)
                if place in self._tensors:
                    raise Corrupt(f"{rows.tensor} rows of layer {rows.layer} are there twice")
                if len(rows.data) != len(cells.positions):
                    raise Corrupt(f"{rows.tensor} rows of layer {rows.layer}: not one for each cell")
                self._tensors[place] = index, rows
        self._used: set[Place] = set()

    def run(self, spec: PartSpec) -> _Run:
        return self._runs[self._find(spec)[0]]

    def rows(self, spec: PartSpec, start: int, stop: int) -> tuple[Form, torch.Tensor]:
        """Rows of tokens [start, stop) in the file's own form."""
        index, rows = self._find(spec)
        place, run = place_of(spec), self._runs[index]
        self._used.add(place)
        layer = layer_of(self._geometry, place)
        rotated = self._rotation is Rotation.ROTATED
        order, pairing = self._state.order, self._geometry.pairing
        form = foreign_form(layer, place.tensor, rows.dtype, order, pairing, rotated)
        if self._rotation is Rotation.UNKNOWN:
            asked = foreign_form(layer, place.tensor, rows.dtype, order, Pairing.HALVES, True)
            if asked.block:
                raise Unsupported("nothing tells whether the quantized rows of this state are rotated")
        picked = run.order[start - run.start : stop - run.start]
        first = int(picked[0])
        if bool((np.diff(picked) == 1).all()):
            return form, rows.data[first : first + len(picked)]
        return form, rows.data.index_select(0, torch.from_numpy(picked))

    @property
    def dtypes(self) -> frozenset[str]:
        return frozenset(rows.dtype for _, rows in self._tensors.values())

    def left(self) -> list[Change]:
        """What no part took."""
        left = []
        if extra := len(self._tensors.keys() - self._used):
            why = "the model's memory has no part for them"
            left.append(Change(Fate.DROPPED, f"{extra} tensor{'s' if extra > 1 else ''} of rows", why))
        if any(cells.extension is not None for cells in self._state.caches):
            why = "positions of text are one number"
            left.append(Change(Fate.DROPPED, "what cells say beside their position", why))
        return left + [Change(Fate.DROPPED, note) for note in self._state.notes]

    def _find(self, spec: PartSpec) -> tuple[int, ForeignRows]:
        place = place_of(spec)
        if place not in self._tensors:
            raise FingerprintMismatch(f"the state has no {place.tensor} rows of layer {place.layer}")
        return self._tensors[place]


def _run(cells: ForeignCells, length: int) -> _Run:
    """Raises Corrupt for positions below 0, there twice, or missing: at the end, or anywhere in a cache that
    has every token."""
    positions = cells.positions
    order = np.argsort(positions, kind="stable").astype(np.int64)
    sorted_ = positions[order]
    if not len(sorted_):
        if length:
            raise Corrupt(f"a cache has no cells, and another ends at position {length - 1:,}")
        return _Run(0, order)
    if sorted_[0] < 0:
        raise Corrupt(f"a cell is at position {int(sorted_[0])}")
    steps = np.diff(sorted_)
    twice, gaps = np.flatnonzero(steps == 0), np.flatnonzero(steps > 1)
    if len(twice):
        raise Corrupt(f"position {int(sorted_[twice[0]]):,} is there twice")
    if sorted_[-1] != length - 1:
        raise Corrupt(f"one cache ends at position {int(sorted_[-1]):,}, another at {length - 1:,}")
    if cells.role is not CacheRole.WINDOW and (len(gaps) or sorted_[0]):
        missing = int(sorted_[gaps[0]]) + 1 if not sorted_[0] else 0
        raise Corrupt(f"position {missing:,} is missing: these are not all tokens of a conversation")
    first = int(gaps[-1]) + 1 if len(gaps) else 0
    return _Run(int(sorted_[first]), order[first:])


def _points(state: ForeignState, target: Target) -> tuple[Point, ...]:
    """Recurrent state at the end, where it is in our order. llama.cpp's operators keep theirs in orders that
    differ from one to the next: who needs it reads the ids anew."""
    specs = parts_of(target.layout, PartKind.POINT)
    if not specs or state.point is None or state.order is not ValueOrder.OURS:
        return ()
    if state.point.position + 1 != state.length:
        raise Corrupt(f"recurrent state after {state.point.position + 1:,} of {state.length:,} tokens")
    there = {(rows.layer, rows.tensor): rows for rows in state.point.rows}
    parts = []
    for spec in specs:
        conv = spec.name.rpartition(".")[0].endswith(".conv")
        found = there.get((spec.layer, Tensor.CONV if conv else Tensor.STATE))
        if found is None:
            raise FingerprintMismatch(f"the state has no {spec.name}")
        form, own = Form(found.dtype, 1, spec.num_values), Form(spec.dtype, 1, spec.num_values)
        parts.append(move(found.data.reshape(1, -1), form, own).data[0])
    return (Point(state.length, tuple(parts)),)
