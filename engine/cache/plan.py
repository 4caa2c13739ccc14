"""One batch as a transaction over every table and part of a memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.batch import Batch, Bools, Ints, Segment, Ubatch, counts_of
from engine.cache.cells import CellTable, Saved, anyone
from engine.cache.parts import Parts, Tables
from engine.cache.points import PointBuffer
from engine.cache.rows import RowBuffer, Slot
from engine.cache.trail import Trails
from engine.cache.view import PartsView, Writing
from engine.state import SeqId


@dataclass(slots=True)
class Undo:
    """What a plan changed, in the order in which it did."""

    metadata: list[tuple[CellTable, Saved]] = field(default_factory=list)
    rows: list[tuple[RowBuffer, Slot, torch.Tensor]] = field(default_factory=list)
    points: dict[tuple[PointBuffer, SeqId], torch.Tensor] = field(default_factory=dict)

    def keep_points(self, buffer: PointBuffer, seqs: Sequence[SeqId]) -> None:
        """Before the point state of `seqs` changes: what it was when the plan began is enough."""
        for seq in seqs:
            if (buffer, seq) not in self.points:
                self.points[buffer, seq] = buffer.read([seq])

    def run(self) -> None:
        """What could fail comes last: where rows cannot be written, at least nobody owns the wrong ones."""
        for table, saved in reversed(self.metadata):
            table.put_back(saved)
        for (points, seq), values in self.points.items():
            points.write([seq], values)
        for buffer, slot, stored in reversed(self.rows):
            buffer.write_bytes(slot, stored)
        self.clear()

    def clear(self) -> None:
        self.metadata.clear()
        self.rows.clear()
        self.points.clear()


@dataclass(frozen=True, slots=True)
class FoundSlot:
    """The cell of every batch row in one table, and whether it held a row when it was found."""

    table: CellTable
    cells: Ints
    held: Bools

    @classmethod
    def find(cls, table: CellTable, batch: Batch) -> FoundSlot:
        """Raises NoSlot. Changes nothing."""
        requests = counts_of(batch)
        cells = np.empty(len(batch), np.int64)
        for (seq, _), found in zip(requests, table.find_slot(requests), strict=True):
            cells[batch.seqs == seq] = found
        return cls(table, cells, anyone(table.owners[:, cells]))


@dataclass(frozen=True, slots=True)
class FoundBlocks:
    """For each sequence of a batch, the first block that closes in it, and the cells of all that do."""

    table: CellTable
    size: int
    firsts: dict[SeqId, int]
    cells: dict[SeqId, Ints]

    @classmethod
    def find(cls, table: CellTable, size: int, batch: Batch) -> FoundBlocks:
        """Raises NoSlot. Changes nothing."""
        firsts, requests = {}, []
        for seq, count in counts_of(batch):
            start = int(batch.positions[batch.seqs == seq][0])
            firsts[seq] = start // size
            requests.append((seq, (start + count) // size - start // size))
        found = zip(requests, table.find_slot(requests), strict=True)
        return cls(table, size, firsts, {seq: cells for (seq, _), cells in found})

    def closing(self, segment: Segment, start: int, stop: int) -> tuple[Ints, Ints]:
        """(numbers, cells) of the blocks that close while a segment goes from `start` to `stop`."""
        first = self.firsts[segment.seq]
        numbers = np.arange(start // self.size, stop // self.size)
        return numbers, self.cells[segment.seq][numbers - first]


class PartsPlan:
    """A batch whose cells are found, in every table, before any of them changes."""

    def __init__(
        self,
        batch: Batch,
        ubatches: tuple[Ubatch, ...],
        parts: Parts,
        tables: Tables,
        trails: Trails,
        device: torch.device,
        done: Callable[[PartsPlan], None],
    ) -> None:
        """`done` is told when the plan ends. Raises NoSlot."""
        self.ubatches = ubatches
        self._batch = batch
        self._parts = parts
        self._tables = tables
        self._trails = trails
        self._new_trails = trails.begin(ubatches)
        self._slots = [FoundSlot.find(table, batch) for table in tables.of_tokens]
        self._blocks = [FoundBlocks.find(table, size, batch) for size, table in tables.blocks.items()]
        self._device = device
        self._done = done
        self._undo = Undo()
        self._applied = 0

    def apply(self, index: int) -> PartsView:
        """See `memory.Plan.apply`."""
        assert index == self._applied, "ubatches are applied in order"
        self._applied += 1
        batch, ubatch = self._batch, self.ubatches[index]
        rows = ubatch.rows
        grid = None if batch.grid is None else batch.grid[rows]
        writing = {}
        for slot in self._slots:
            table, cells = slot.table, slot.cells[rows]
            overwritten = cells[slot.held[rows]]
            saved = table.occupy(cells, batch.seqs[rows], batch.positions[rows], batch.tokens[rows], grid)
            self._undo.metadata.append((table, saved))
            writing[id(table)] = Writing(Slot.of(cells, self._device), Slot.of(overwritten, self._device))
        closing = {
            (id(found.table), segment): Slot.of(self._close(found, ubatch, segment), self._device)
            for found in self._blocks
            for segment in ubatch.segments
        }
        steps = self._new_trails.steps(ubatch)
        return PartsView(ubatch, self._parts, self._tables.base, writing, closing, self._undo, steps)

    def _close(self, found: FoundBlocks, ubatch: Ubatch, segment: Segment) -> Ints:
        """Occupy the cells of the blocks that close in a segment. The token of a block is its last one's."""
        positions = ubatch.positions[segment.start : segment.stop]
        start, stop = int(positions[0]), int(positions[-1]) + 1
        numbers, cells = found.closing(segment, start, stop)
        if len(cells):
            last = (numbers + 1) * found.size - 1
            tokens = ubatch.tokens[segment.start + last - start]
            seqs = np.full(len(cells), segment.seq)
            self._undo.metadata.append((found.table, found.table.occupy(cells, seqs, numbers, tokens, None)))
        return cells

    def commit(self) -> None:
        """Keep what was applied."""
        self._undo.clear()
        self._trails.keep(self._new_trails)
        self._done(self)

    def rollback(self) -> None:
        """See `memory.Plan.rollback`."""
        self._undo.run()
        self._done(self)
