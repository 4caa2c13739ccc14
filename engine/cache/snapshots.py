"""Rows out of the cells of a sequence, and back into free ones."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.batch import Bools, Ints
from engine.cache.cells import CellTable, anyone
from engine.cache.checks import check_rows, check_runs
from engine.cache.parts import BlocksPart, Parts, RowsPart, Tables
from engine.cache.plan import Undo
from engine.cache.rows import Slot
from engine.errors import StateError
from engine.state import PartKind, Rows, Run, SeqId

Stored = RowsPart | BlocksPart


def snapshot_rows(parts: Parts, seq: SeqId, since: int, length: int) -> tuple[Rows, ...]:
    """Copies of what `parts` hold of the sequence from `since` on: one run a kind, none where it is empty."""
    out = []
    for kind, same_kind in itertools.groupby(parts.stored, key=lambda part: part.spec.kind):
        members = tuple(same_kind)
        start = since if kind is PartKind.BLOCK else max(since, members[0].table.held_range(seq)[0])
        if start >= length:
            continue
        slots: dict[int, Slot] = {}
        for part in members:
            if id(part.table) not in slots:
                unit = part.spec.block
                cells = part.table.cells_of(seq, start // unit, length // unit)
                slots[id(part.table)] = Slot.of(cells, part.buffer.device)
        copies = tuple(part.buffer.read_bytes(slots[id(part.table)]) for part in members)
        out.append(Rows(kind, start, length, copies))
    return tuple(out)


def restore_parts(
    parts: Parts,
    tables: Tables,
    seq: SeqId,
    tokens: tuple[int, ...],
    rows: Sequence[Run],
    needed_from: int,
) -> None:
    """Put `rows` in place of what `seq` has; window rows must reach back to `needed_from`.

    What the runs are of is checked, and all cells found, before anything is read or changes; what breaks off
    then is undone, rows that were written over included. Raises NoSlot, StateError, and what reading raises.
    """
    length = len(tokens)
    known = {part.spec.kind for part in parts.stored}
    unknown = {run.kind for run in rows} - known
    if unknown:
        raise StateError(f"the state has {', '.join(sorted(unknown))} rows, which this memory has not")
    firsts: dict[PartKind, int] = {}
    for kind in sorted(known):
        runs = tuple(run for run in rows if run.kind is kind)
        firsts[kind] = check_runs(kind, runs, length, needed_from if kind is PartKind.WINDOW else 0)
    undo = Undo()
    owners = [(table, table.owners[seq].copy()) for table, _ in tables]
    held = {id(table): anyone(table.owners) for table, _ in tables}
    try:
        for table, _ in tables:
            table.remove(seq, 0, None)
        found = {}
        for table, unit in tables:
            first = 0
            if table is tables.windowed and PartKind.WINDOW in firsts:
                first = _first_kept(table, firsts[PartKind.WINDOW], needed_from, length)
            cells = table.find_slot([(seq, length // unit - first)])[0]
            found[id(table)] = _Found(table, unit, first, cells)
        _keep_overwritten(parts, found, held, undo)
        _fill(parts, found, seq, tokens, rows, undo)
    except BaseException:
        try:
            undo.run()
        finally:
            for table, owned in owners:
                table.owners[seq] = owned
        raise


@dataclass(frozen=True, slots=True)
class _Found:
    """Cells for positions of one table from `first` on; a position stands for `unit` tokens."""

    table: CellTable
    unit: int
    first: int
    cells: Ints

    def slot(self, start: int, stop: int, device: torch.device) -> Slot:
        """The cells of tokens [start, stop), as far as they are kept."""
        kept = slice(max(start // self.unit - self.first, 0), max(stop // self.unit - self.first, 0))
        return Slot.of(self.cells[kept], device)


def _keep_overwritten(
    parts: Parts, found: Mapping[int, _Found], held: Mapping[int, Bools], undo: Undo
) -> None:
    """Before rows are put into cells that hold some already."""
    for part in parts.stored:
        cells = found[id(part.table)].cells
        slot = Slot.of(cells[held[id(part.table)][cells]], part.buffer.device)
        if len(slot):
            undo.rows.append((part.buffer, slot, part.buffer.read_bytes(slot)))


def _fill(
    parts: Parts,
    found: Mapping[int, _Found],
    seq: SeqId,
    tokens: tuple[int, ...],
    rows: Sequence[Run],
    undo: Undo,
) -> None:
    """Put tokens and rows into the cells that were found."""
    ids = np.asarray(tokens, np.int64)
    for each in found.values():
        positions = np.arange(each.first, each.first + len(each.cells))
        last = (positions + 1) * each.unit - 1
        seqs = np.full(len(each.cells), seq)
        undo.metadata.append((each.table, each.table.occupy(each.cells, seqs, positions, ids[last], None)))
    for run in rows:
        members, read = _members(parts, run.kind), run.parts
        check_rows(tuple(part.spec for part in members), run, read)
        slots: dict[int, Slot] = {}
        for part, stored in zip(members, read, strict=True):
            key = id(part.table)
            if key not in slots:
                slots[key] = found[key].slot(run.start, run.stop, part.buffer.device)
            slot, num_rows = slots[key], len(stored)
            if num_rows > len(slot):
                stored = stored[num_rows - len(slot) :]
            if len(slot):
                part.buffer.write_bytes(slot, stored)


def _members(parts: Parts, kind: PartKind) -> tuple[Stored, ...]:
    return tuple(part for part in parts.stored if part.spec.kind is kind)


def _first_kept(table: CellTable, first: int, latest: int, length: int) -> int:
    """How far back to keep window rows that go back to `first`: what is needed, and what else fits; where
    rows get dropped anyway, into the sequence's share."""
    room = int(table.takeable().sum())
    if table.window is not None:
        room = min(room, table.num_cells // table.num_seqs)
    return max(first, min(latest, length - room))
