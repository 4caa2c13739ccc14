"""The view that the layers of a model get of one applied ubatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.batch import Ints, Segment, Ubatch
from engine.cache.attention import Scoring, attend, build_mask, grouped, narrowed
from engine.cache.cells import CellTable
from engine.cache.memory import KEYS, NULL_TOKEN, VALUES, Chosen, Held, WindowSpec
from engine.cache.parts import Parts, RowsPart
from engine.cache.points import PointBuffer
from engine.cache.rows import RowBuffer, Slot
from engine.cache.trail import Steps
from engine.state import SeqId

#: So many queries are computed at a time, over the keys up to the last one's own: a wider block spends
#: more on keys that its first queries may not see, a narrower one more on calls.
BLOCK = 128


@dataclass(frozen=True, slots=True)
class Writing:
    """Where a ubatch's rows go in one table. `overwritten` are those cells that held rows before."""

    slot: Slot
    overwritten: Slot


class Log(Protocol):
    """Takes what writing destroys."""

    rows: list[tuple[RowBuffer, Slot, torch.Tensor]]

    def keep_points(self, buffer: PointBuffer, seqs: Sequence[SeqId]) -> None: ...


@dataclass(frozen=True, slots=True)
class Block:
    """Rows [start, stop) of the ubatch, over keys [first, end) of their reading's slot."""

    start: int
    stop: int
    first: int
    end: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Reading:
    """What one segment reads in layers of one kind, block by block of its queries. `slot` has the rows that
    segments of its sequence read, read once for all of them; the segment's own begin with row `first`."""

    segment: Segment
    slot: Slot
    first: int
    blocks: tuple[Block, ...]


class PartsView:
    """See `memory.View`. Slots and masks are worked out once and serve every layer of a kind."""

    def __init__(
        self,
        ubatch: Ubatch,
        parts: Parts,
        base: CellTable,
        writing: dict[int, Writing],
        closing: dict[tuple[int, Segment], Slot],
        log: Log,
        steps: Steps,
    ) -> None:
        """`writing` is by `id` of the table, `closing` by that of a table of blocks and by segment."""
        self.segments = ubatch.segments
        self.positions = ubatch.positions
        self._parts = parts
        self._base = base
        self._writing = writing
        self._closing = closing
        self._log = log
        self._steps = steps
        self._seqs = [segment.seq for segment in ubatch.segments]
        self._slots: dict[tuple[int, WindowSpec | None, Segment], tuple[Slot, Ints]] = {}
        self._readings: dict[tuple[int, WindowSpec | None, int], tuple[Reading, ...]] = {}

    # -- attention ---------------------------------------------------------------------------------

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        scale: float,
        softcap: float | None = None,
        *,
        sinks: torch.Tensor | None = None,
        chosen: Chosen | None = None,
    ) -> torch.Tensor:
        """See `memory.View.attend`."""
        if k is not None:
            self.append(KEYS, layer, k)
        if v is not None:
            self.append(VALUES, layer, v)
        part = self._parts.rows[KEYS, layer]
        keys, values = part.buffer, self._values(part)
        if not q.shape[1]:  # a rank without heads
            return q.new_empty(len(q), 0, part.need.value_size or values.head_size)
        scoring = Scoring(scale, softcap, sinks)
        if keys.hadamard is not None:
            q = keys.hadamard.rotate(q)
        out = []
        read: Slot | None = None
        for index, reading in enumerate(self._reading(part, q.shape[1] // keys.num_heads)):
            if chosen is not None and reading.segment.stop - reading.segment.start == 1:
                out.append(self._of_picked(part, reading, q, chosen[index][..., 0, :], scoring))
                continue
            if read is not reading.slot:
                read = reading.slot
                k_rows = keys.read(read)
                v_rows = k_rows[..., : part.need.value_size] if values is keys else values.read(read)
            for block in reading.blocks:
                seen = slice(block.first, block.end)
                rows = q[block.start : block.stop]
                if chosen is None:
                    out.append(attend(rows, k_rows[seen], v_rows[seen], block.mask, scoring))
                    continue
                at = slice(block.start - reading.segment.start, block.stop - reading.segment.start)
                own = slice(block.first - reading.first, block.end - reading.first)
                picked, v_seen = chosen[index][..., at, own], part.need.value_size or v_rows[seen]
                out.append(narrowed(rows, k_rows[seen], v_seen, block.mask, picked, scoring))
        joined = out[0] if len(out) == 1 else torch.cat(out)
        return joined if values.hadamard is None else values.hadamard.rotate(joined)

    def _of_picked(
        self, part: RowsPart, reading: Reading, q: torch.Tensor, picked: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """What the only query of a segment makes of the rows that it has `picked`, bool [rows] or [kv heads,
        rows]. No others are read."""
        keys, values = part.buffer, self._values(part)
        size, group = part.need.value_size, q.shape[1] // keys.num_heads
        row = q[reading.segment.start : reading.segment.stop]
        if picked.dim() == 1:
            slot = reading.slot.pick(picked.nonzero()[:, 0] + reading.first)
            k_rows = keys.read(slot)
            v_rows = k_rows[..., :size] if values is keys else values.read(slot)
            return attend(row, k_rows, v_rows, None, scoring)
        out = []
        for head, of_head in enumerate(picked):
            slot = reading.slot.pick(of_head.nonzero()[:, 0] + reading.first)
            heads = slice(head * group, (head + 1) * group)
            k_rows = keys.read_head(slot, head)
            v_rows = k_rows[..., :size] if values is keys else values.read_head(slot, head)
            out.append(attend(row[:, heads], k_rows, v_rows, None, scoring.of(heads)))
        return torch.cat(out, 1)

    def _values(self, part: RowsPart) -> RowBuffer:
        return part.buffer if part.need.value_size else self._parts.rows[VALUES, part.need.layer].buffer

    def _reading(self, part: RowsPart, group: int) -> tuple[Reading, ...]:
        key = (id(part.table), part.need.window, group)
        if key not in self._readings:
            spans: dict[SeqId, Segment] = {}
            for of in self.segments:
                spans[of.seq] = Segment(of.seq, spans.get(of.seq, of).start, of.stop)
            readings = (self._read(part, segment, spans[segment.seq], group) for segment in self.segments)
            self._readings[key] = tuple(readings)
        return self._readings[key]

    def _read(self, part: RowsPart, segment: Segment, span: Segment, group: int) -> Reading:
        """`span` is from the start of the sequence's first segment to the end of its last."""
        slot, keys = self._slot(part, span)
        queries = self.positions[segment.start : segment.stop]
        own = int(np.searchsorted(keys, _first_visible(part, queries)))
        blocks = tuple(
            self._block(part, group, segment.start + at, queries[at : at + BLOCK], keys)
            for at in range(0, len(queries), BLOCK)
        )
        return Reading(segment, slot, own, blocks)

    def _block(self, part: RowsPart, group: int, start: int, queries: Ints, keys: Ints) -> Block:
        first = int(np.searchsorted(keys, _first_visible(part, queries)))
        end = int(np.searchsorted(keys, queries[-1], side="right"))
        buffer = part.buffer
        mask = build_mask(queries, keys[first:end], part.need.window, buffer.compute, buffer.device)
        return Block(start, start + len(queries), first, end, grouped(mask, group))

    def _slot(self, part: RowsPart, segment: Segment) -> tuple[Slot, Ints]:
        """Where the rows are that a segment may see, in order, and their positions."""
        key = (id(part.table), part.need.window, segment)
        if key not in self._slots:
            queries = self.positions[segment.start : segment.stop]
            first = _first_visible(part, queries)
            cells = part.table.cells_of(segment.seq, first, int(queries[-1]) + 1)
            self._slots[key] = Slot.of(cells, part.buffer.device), part.table.positions[cells]
        return self._slots[key]

    # -- rows --------------------------------------------------------------------------------------

    def append(self, name: str, layer: int, rows: torch.Tensor) -> None:
        """See `memory.View.append`."""
        part = self._parts.rows[name, layer]
        writing, buffer = self._writing[id(part.table)], part.buffer
        if len(writing.overwritten):
            old = buffer.read_bytes(writing.overwritten)
            self._log.rows.append((buffer, writing.overwritten, old))
        buffer.write(writing.slot, rows)

    def held(self, name: str, layer: int, segment: Segment) -> Held:
        """See `memory.View.held`."""
        part = self._parts.rows[name, layer]
        slot, positions = self._slot(part, segment)
        return Held(part.buffer.read(slot), positions)

    def into_basis(self, name: str, layer: int, x: torch.Tensor) -> torch.Tensor:
        """See `memory.View.into_basis`."""
        key = name, layer
        part = self._parts.blocks[key] if key in self._parts.blocks else self._parts.rows[key]
        return x if part.buffer.hadamard is None else part.buffer.hadamard.rotate(x)

    def out_of_basis(self, name: str, layer: int, x: torch.Tensor) -> torch.Tensor:
        """See `memory.View.out_of_basis`."""
        return self.into_basis(name, layer, x)  # the rotation is its own inverse

    # -- blocks ------------------------------------------------------------------------------------

    def close(self, name: str, layer: int, segment: Segment, rows: torch.Tensor) -> None:
        """See `memory.View.close`."""
        part = self._parts.blocks[name, layer]
        slot = self._closing[id(part.table), segment]
        assert len(rows) == len(slot), "a row for each block that closes"
        if len(slot):
            part.buffer.write(slot, rows[:, None])

    def blocks(self, name: str, layer: int, segment: Segment) -> torch.Tensor:
        """See `memory.View.blocks`."""
        part = self._parts.blocks[name, layer]
        key = (id(part.table), None, segment)
        if key not in self._slots:
            stop = (int(self.positions[segment.stop - 1]) + 1) // part.need.block
            cells = part.table.cells_of(segment.seq, 0, stop)
            self._slots[key] = Slot.of(cells, part.buffer.device), part.table.positions[cells]
        return part.buffer.read(self._slots[key][0])[:, 0]

    # -- point state and tokens --------------------------------------------------------------------

    def point(self, name: str, layer: int) -> torch.Tensor:
        """See `memory.View.point`."""
        return self._parts.points[name, layer].buffer.read(self._seqs)

    @property
    def newest(self) -> int:
        """See `memory.View.newest`."""
        return self._steps.newest

    def set_point(self, name: str, layer: int, states: torch.Tensor) -> None:
        """See `memory.View.set_point`."""
        assert states.shape[:2] == (len(self._seqs), self.newest), "the newest states of every segment"
        buffer = self._parts.points[name, layer].buffer
        self._log.keep_points(buffer, self._seqs)
        buffer.write(self._seqs, states[:, -1])
        self._steps.add((name, layer), states)

    def previous_tokens(self, count: int) -> Ints:
        """See `memory.View.previous_tokens`."""
        out = np.empty((len(self.positions), count), np.int64)
        for segment in self.segments:
            queries = self.positions[segment.start : segment.stop]
            first, stop = int(queries[0]) - count, int(queries[-1])
            cells = self._base.cells_of(segment.seq, max(0, first), stop)
            line = np.full(stop - first, NULL_TOKEN)
            line[self._base.positions[cells] - first] = self._base.tokens[cells]
            out[segment.start : segment.stop] = np.lib.stride_tricks.sliding_window_view(line, count)
        return out


def _first_visible(part: RowsPart, queries: Ints) -> int:
    window = part.need.window
    return 0 if window is None else int(window.first_visible(queries[:1])[0])
