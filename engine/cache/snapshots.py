"""Rows out of the cells of a sequence, and back into free ones."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.batch import Ints
from engine.cache.cells import CellTable
from engine.cache.rows import RowBuffer, Slot
from engine.errors import StateError
from engine.state import Layout, PartKind, PartSpec, Point, Rows, SeqId

_RANKS = {kind: rank for rank, kind in enumerate(PartKind)}


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the layout, where its rows are, and the table of their cells."""

    spec: PartSpec
    buffer: RowBuffer
    table: CellTable

    def rank(self) -> tuple[int, int, str]:
        """Its place in the layout: by kind, then layer, then name."""
        return _RANKS[self.spec.kind], self.spec.layer, self.spec.name


def layout_of(parts: Sequence[Part]) -> Layout:
    return tuple(part.spec for part in parts)


def snapshot_rows(parts: Sequence[Part], seq: SeqId, since: int) -> tuple[Rows, ...]:
    """Copies of what `parts` hold of the sequence from `since` on: one run a kind, none where it is empty."""
    out = []
    for kind, same_kind in itertools.groupby(parts, key=lambda part: part.spec.kind):
        members = tuple(same_kind)
        table = members[0].table
        first, stop = table.held_range(seq)
        start = max(since, first)
        if start >= stop:
            continue
        slot = Slot.of(table.cells_of(seq, start, stop), members[0].buffer.device)
        out.append(Rows(kind, start, stop, tuple(part.buffer.read_bytes(slot) for part in members)))
    return tuple(out)


def restore_rows(
    parts: Sequence[Part],
    tables: Sequence[CellTable],
    seq: SeqId,
    tokens: tuple[int, ...],
    rows: tuple[Rows, ...],
    points: tuple[Point, ...],
    needed_from: int,
) -> None:
    """Fill the empty `seq` with `rows`; window rows must reach back to `needed_from`.

    Everything is checked, and all cells found, before anything changes. Raises NoSlot, StateError.
    """
    length = len(tokens)
    if points:
        raise StateError("the state has point parts, which this memory has not")
    known = {part.spec.kind for part in parts}
    unknown = {run.kind for run in rows} - known
    if unknown:
        raise StateError(f"the state has {', '.join(sorted(unknown))} rows, which this memory has not")
    firsts = dict.fromkeys(tables, 0)
    for kind in sorted(known):
        members = tuple(part for part in parts if part.spec.kind is kind)
        runs = tuple(run for run in rows if run.kind is kind)
        latest = needed_from if kind is PartKind.WINDOW else 0
        first = _check_runs(members, runs, length, latest)
        table = members[0].table
        firsts[table] = first if kind is PartKind.TOKEN else _first_kept(table, first, latest, length)
    found = {table: table.find_slot([(seq, length - firsts[table])])[0] for table in tables}
    try:
        _fill(parts, found, seq, tokens, rows)
    except BaseException:
        for table in tables:
            table.remove(seq, 0, None)
        raise


def _fill(
    parts: Sequence[Part],
    found: Mapping[CellTable, Ints],
    seq: SeqId,
    tokens: tuple[int, ...],
    rows: tuple[Rows, ...],
) -> None:
    """Put tokens and rows into the cells `found` for the last of them."""
    length = len(tokens)
    ids = np.asarray(tokens, np.int64)
    for table, cells in found.items():
        positions = np.arange(length - len(cells), length)
        table.occupy(cells, np.full(len(cells), seq), positions, ids[positions], None)
    for run in rows:
        members = tuple(part for part in parts if part.spec.kind is run.kind)
        cells = found[members[0].table]
        first = length - len(cells)
        start = max(run.start, first)
        if start >= run.stop:
            continue
        slot = Slot.of(cells[start - first : run.stop - first], members[0].buffer.device)
        for part, stored in zip(members, run.parts, strict=True):
            part.buffer.write_bytes(slot, stored[start - run.start :])


def _check_runs(members: Sequence[Part], runs: Sequence[Rows], length: int, latest: int) -> int:
    """The first position that `runs` cover. Raises StateError unless they are well-formed, consecutive,
    begin at `latest` or before, and end at `length`."""
    kind = members[0].spec.kind
    at = runs[0].start if runs else length
    if at > latest:
        raise StateError(f"{kind} rows are needed from {latest} on, and there are none before {at}")
    first = at
    for run in runs:
        if run.start != at or run.stop < run.start:
            raise StateError(f"{kind} rows [{run.start}, {run.stop}) do not follow those up to {at}")
        if len(run.parts) != len(members):
            raise StateError(f"{kind} rows have {len(run.parts)} parts, not {len(members)}")
        for part, stored in zip(members, run.parts, strict=True):
            shape = (run.stop - run.start, part.spec.row_nbytes)
            if stored.dtype != torch.uint8 or tuple(stored.shape) != shape:
                raise StateError(f"part {part.spec.name}: {stored.dtype} {tuple(stored.shape)}, not {shape}")
        at = run.stop
    if at != length:
        raise StateError(f"{kind} rows end at {at}, and there are {length} tokens")
    return first


def _first_kept(table: CellTable, first: int, latest: int, length: int) -> int:
    """How far back to keep window rows that go back to `first`: what is needed, and what else fits; where
    rows get dropped anyway, into the sequence's share."""
    room = int(table.takeable().sum())
    if table.window is not None:
        room = min(room, table.num_cells // table.num_seqs)
    return max(first, min(latest, length - room))
