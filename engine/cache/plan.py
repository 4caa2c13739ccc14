"""One batch as a transaction over every table of a memory, and the view that model layers get of a ubatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.batch import Batch, Bools, Ints, Ubatch, counts_of
from engine.cache.attention import Scoring, attend, build_mask, grouped
from engine.cache.cells import CellTable, Saved, anyone
from engine.cache.memory import WindowSpec
from engine.cache.rows import RowBuffer, Slot


@dataclass(frozen=True, slots=True)
class LayerRows:
    """One layer's buffers, the table that its cells are in, and what its queries may see."""

    table: CellTable
    keys: RowBuffer
    values: RowBuffer
    window: WindowSpec | None


@dataclass(slots=True)
class Undo:
    """What a plan changed, in the order in which it did."""

    metadata: list[tuple[CellTable, Saved]] = field(default_factory=list)
    rows: list[tuple[RowBuffer, Slot, torch.Tensor]] = field(default_factory=list)

    def run(self) -> None:
        for buffer, slot, stored in reversed(self.rows):
            buffer.write_bytes(slot, stored)
        for table, saved in reversed(self.metadata):
            table.put_back(saved)
        self.clear()

    def clear(self) -> None:
        self.metadata.clear()
        self.rows.clear()


#: So many queries are computed at a time, over the keys up to the last one's own: a wider block spends
#: more on keys that its first queries may not see, a narrower one more on calls.
BLOCK = 128


@dataclass(frozen=True, slots=True)
class Block:
    """Rows [start, stop) of the ubatch, over keys [first, end) of their segment's slot."""

    start: int
    stop: int
    first: int
    end: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Reading:
    """What one segment reads in layers of one kind: the rows in `slot`, block by block of its queries."""

    slot: Slot
    blocks: tuple[Block, ...]


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
class Writing:
    """Where a ubatch's rows go in one table. `overwritten` are those cells that held rows before."""

    slot: Slot
    overwritten: Slot


class KvView:
    """One applied ubatch. Slots and masks are worked out once and serve every layer of a kind."""

    def __init__(
        self, ubatch: Ubatch, layers: dict[int, LayerRows], writing: dict[int, Writing], undo: Undo
    ) -> None:
        """`writing` is by `id` of the table. `undo` takes what writing destroys."""
        self._ubatch = ubatch
        self._layers = layers
        self._writing = writing
        self._undo = undo
        self._readings: dict[tuple[int, WindowSpec | None, int], tuple[Reading, ...]] = {}

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """See `memory.View.attend`."""
        rows = self._layers[layer]
        self._write(rows, k, v)
        readings = self._reading(rows, q.shape[1] // k.shape[1])
        scoring = Scoring(scale, softcap)
        if rows.keys.hadamard is not None:
            q = rows.keys.hadamard.rotate(q)
        parts = []
        for reading in readings:
            keys, values = rows.keys.read(reading.slot), rows.values.read(reading.slot)
            for block in reading.blocks:
                seen = slice(block.first, block.end)
                parts.append(
                    attend(q[block.start : block.stop], keys[seen], values[seen], block.mask, scoring)
                )
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out if rows.values.hadamard is None else rows.values.hadamard.rotate(out)

    def _write(self, rows: LayerRows, k: torch.Tensor, v: torch.Tensor) -> None:
        writing = self._writing[id(rows.table)]
        for buffer, new in ((rows.keys, k), (rows.values, v)):
            if len(writing.overwritten):
                old = buffer.read_bytes(writing.overwritten)
                self._undo.rows.append((buffer, writing.overwritten, old))
            buffer.write(writing.slot, new)

    def _reading(self, rows: LayerRows, group: int) -> tuple[Reading, ...]:
        key = (id(rows.table), rows.window, group)
        if key not in self._readings:
            self._readings[key] = tuple(self._read(rows, group))
        return self._readings[key]

    def _read(self, rows: LayerRows, group: int) -> list[Reading]:
        readings = []
        for segment in self._ubatch.segments:
            queries = self._ubatch.positions[segment.start : segment.stop]
            first = _first_visible(rows, queries)
            cells = rows.table.cells_of(segment.seq, first, int(queries[-1]) + 1)
            keys = rows.table.positions[cells]
            blocks = tuple(
                self._block(rows, group, segment.start + at, queries[at : at + BLOCK], keys)
                for at in range(0, len(queries), BLOCK)
            )
            readings.append(Reading(Slot.of(cells, rows.keys.device), blocks))
        return readings

    def _block(self, rows: LayerRows, group: int, start: int, queries: Ints, keys: Ints) -> Block:
        first = int(np.searchsorted(keys, _first_visible(rows, queries)))
        end = int(np.searchsorted(keys, queries[-1], side="right"))
        mask = build_mask(queries, keys[first:end], rows.window, rows.keys.compute, rows.keys.device)
        return Block(start, start + len(queries), first, end, grouped(mask, group))


def _first_visible(rows: LayerRows, queries: Ints) -> int:
    return 0 if rows.window is None else int(rows.window.first_visible(queries[:1])[0])


class KvPlan:
    """A batch whose cells are found, in every table, before any of them changes."""

    def __init__(
        self,
        batch: Batch,
        ubatches: tuple[Ubatch, ...],
        layers: dict[int, LayerRows],
        slots: Sequence[FoundSlot],
        device: torch.device,
        done: Callable[[KvPlan], None],
    ) -> None:
        """`slots` has one for every table. `done` is told when the plan ends."""
        self.ubatches = ubatches
        self._batch = batch
        self._layers = layers
        self._slots = slots
        self._device = device
        self._done = done
        self._undo = Undo()
        self._applied = 0

    def apply(self, index: int) -> KvView:
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
        return KvView(ubatch, self._layers, writing, self._undo)

    def commit(self) -> None:
        """Keep what was applied."""
        self._undo.clear()
        self._done(self)

    def rollback(self) -> None:
        """See `memory.Plan.rollback`."""
        self._undo.run()
        self._done(self)
