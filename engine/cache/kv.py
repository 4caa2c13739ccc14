"""Keys and values of every token, [positions, kv heads, head size] for each layer.

`KvMemory` serves layers that see everything and layers that see a window alike: with a second, smaller
table for the latter it is the "iswa" of `iswa.py`. Both tables change together or not at all.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.batch import Batch, Ints, counts_of, split_simple
from engine.cache.cells import CellTable, Move
from engine.cache.memory import LayerSpec, MemorySpec
from engine.cache.plan import FoundSlot, KvPlan, LayerRows
from engine.cache.rows import RowBuffer, Slot
from engine.cache.snapshots import Part, layout_of, restore_rows, snapshot_rows
from engine.errors import BatchRefused, EditRefused
from engine.state import Layout, PartKind, PartSpec, Point, Rows, SeqId


class KvMemory:
    """See `memory.Memory`. `base` knows every position; `windowed`, if there is one, the last of them."""

    def __init__(self, spec: MemorySpec, base: CellTable, windowed: CellTable | None) -> None:
        self._spec = spec
        self._base = base
        self._windowed = windowed
        self._tables = (base,) if windowed is None else (base, windowed)
        self._layers = {layer.layer: self._build(layer) for layer in spec.layers}
        self._rotaries = {layer.layer: layer.rotary for layer in spec.layers}
        self._windows = tuple({layer.window for layer in spec.layers if layer.window is not None})
        self._parts = tuple(sorted(self._build_parts(), key=Part.rank))
        self._plan: KvPlan | None = None

    def _build(self, layer: LayerSpec) -> LayerRows:
        table = self._base if layer.window is None or self._windowed is None else self._windowed
        spec = self._spec

        def buffer(size: int, dtype: str, field: str) -> RowBuffer:
            return RowBuffer(
                table.num_cells, layer.num_kv_heads, size, dtype, spec.dtype, spec.device, field=field
            )

        keys = buffer(layer.head_size_k, spec.type_k, "type_k")
        return LayerRows(table, keys, buffer(layer.head_size_v, spec.type_v, "type_v"), layer.window)

    def _build_parts(self) -> list[Part]:
        parts = []
        for layer, rows in self._layers.items():
            kind = PartKind.TOKEN if rows.table is self._base else PartKind.WINDOW
            window = None if kind is PartKind.TOKEN or rows.window is None else rows.window.size
            for letter, buffer in (("k", rows.keys), ("v", rows.values)):
                shape = (buffer.num_heads, buffer.head_size)
                spec = PartSpec(f"kv.{letter}.{layer:02}", kind, layer, buffer.dtype, shape, window=window)
                parts.append(Part(spec, buffer, rows.table))
        return parts

    @property
    def layout(self) -> Layout:
        return layout_of(self._parts)

    @property
    def rotated(self) -> tuple[bool, bool]:
        layers = self._layers.values()
        return (
            any(rows.keys.hadamard is not None for rows in layers),
            any(rows.values.hadamard is not None for rows in layers),
        )

    # -- tokens in ---------------------------------------------------------------------------------

    def plan(self, batch: Batch) -> KvPlan:
        self._idle()
        self._check(batch)
        slots = [FoundSlot.find(table, batch) for table in self._tables]
        ubatches = split_simple(batch, self._spec.max_ubatch)
        self._plan = KvPlan(batch, ubatches, self._layers, slots, self._spec.device, self._ended)
        return self._plan

    def _ended(self, plan: KvPlan) -> None:
        assert self._plan is plan, "a plan ends once"
        self._plan = None

    def _idle(self) -> None:
        assert self._plan is None, "the plan before has not ended"

    def _check(self, batch: Batch) -> None:
        if not 0 < len(batch) <= self._spec.max_batch:
            raise BatchRefused(f"a batch of {len(batch)} tokens: it can have 1 to {self._spec.max_batch}")
        for seq, count in counts_of(batch):
            if not 0 <= seq < self._spec.num_seqs:
                raise BatchRefused(f"no sequence {seq}: there are {self._spec.num_seqs}")
            first = self._base.next_position(seq)
            positions = batch.positions[batch.seqs == seq]
            if not np.array_equal(positions, np.arange(first, first + count)):
                raise BatchRefused(f"positions of sequence {seq} must go on at {first} without a hole")

    # -- edits -------------------------------------------------------------------------------------

    def remove(self, seq: SeqId | None, start: int, stop: int | None) -> None:
        self._idle()
        for one in self._chosen(seq):
            end = self._base.next_position(one)
            last = end if stop is None else min(stop, end)
            if start >= last:
                continue
            if last < end:
                self._refuse_hole()
            elif not self.can_resume_at(one, start):
                raise EditRefused(f"sequence {one} cannot go on at {start}: its window rows are gone")
        for table in self._tables:
            table.remove(seq, start, stop)

    def copy(self, source: SeqId, target: SeqId, start: int = 0, stop: int | None = None) -> None:
        self._idle()
        if source == target:
            raise EditRefused(f"sequence {source} cannot be copied onto itself")
        end = self._base.next_position(source)
        stop = end if stop is None else min(stop, end)
        if start > 0:
            self._refuse_hole()
        elif not self.can_resume_at(source, stop):
            raise EditRefused(f"sequence {source} cannot be copied up to {stop}: its window rows are gone")
        for table in self._tables:
            table.copy(source, target, start, stop)

    def keep(self, seq: SeqId) -> None:
        self._idle()
        for table in self._tables:
            table.keep(seq)

    def shift(self, seq: SeqId | None, start: int, stop: int | None, delta: int) -> None:
        def moved(positions: Ints) -> Ints:
            return positions + delta

        self._move([table.plan_move(seq, start, stop, moved) for table in self._movable()])

    def discard(self, seq: SeqId, start: int, stop: int) -> None:
        tables = self._movable()
        owners = [table.owners[seq].copy() for table in tables]

        def moved(positions: Ints) -> Ints:
            return positions + (start - stop)

        try:
            for table in tables:
                table.remove(seq, start, stop)
            moves = [table.plan_move(seq, stop, None, moved) for table in tables]
        except BaseException:
            for table, owned in zip(tables, owners, strict=True):
                table.owners[seq] = owned
            raise
        self._move(moves)

    def divide(self, seq: SeqId | None, start: int, stop: int | None, divisor: int) -> None:
        if divisor < 1:
            raise EditRefused(f"positions cannot be divided by {divisor}")

        def divided(positions: Ints) -> Ints:
            return positions // divisor

        self._move([table.plan_move(seq, start, stop, divided) for table in self._movable()])

    def refuse_shift(self) -> str | None:
        if self._has_short_window():
            return "rows that its sliding windows have dropped cannot be moved (full_windows keeps them)"
        return None

    def _movable(self) -> tuple[CellTable, ...]:
        self._idle()
        refusal = self.refuse_shift()
        if refusal is not None:
            raise EditRefused(refusal)
        return self._tables

    def _move(self, moves: list[Move]) -> None:
        """Carry out one move a table: rows first, while the sources are still where they were."""
        for table, move in zip(self._tables, moves, strict=True):
            copied = move.sources != move.targets
            for layer, rows in self._layers.items():
                if rows.table is table:
                    self._move_rows(layer, rows, move, copied)
            table.apply_move(move)

    def _move_rows(self, layer: int, rows: LayerRows, move: Move, copied: np.ndarray) -> None:
        """Keys are turned by how far they move, in float32 and un-rotated; values are copied if at all."""
        device = self._spec.device
        source, target = Slot.of(move.sources[copied], device), Slot.of(move.targets[copied], device)
        if len(source):
            rows.values.write_bytes(target, rows.values.read_bytes(source))
        rotary = self._rotaries[layer]
        if rotary is None:
            if len(source):
                rows.keys.write_bytes(target, rows.keys.read_bytes(source))
        elif len(move.sources):
            keys = rows.keys.read_plain(Slot.of(move.sources, device))
            turned = rotary.rerotate(keys, torch.from_numpy(move.deltas))
            rows.keys.write(Slot.of(move.targets, device), turned)

    def _refuse_hole(self) -> None:
        if self._has_short_window():
            raise EditRefused("only the end of a sequence can be removed from a sliding window")

    def _has_short_window(self) -> bool:
        return any(table.window is not None for table in self._tables)

    def _chosen(self, seq: SeqId | None) -> list[SeqId]:
        return [seq] if seq is not None else [SeqId(i) for i in range(self._spec.num_seqs)]

    # -- questions ---------------------------------------------------------------------------------

    def pos_min(self, seq: SeqId) -> int | None:
        return self._base.pos_min(seq)

    def pos_max(self, seq: SeqId) -> int | None:
        return self._base.pos_max(seq)

    def can_resume_at(self, seq: SeqId, position: int) -> bool:
        if not 0 <= position <= self._base.next_position(seq):
            return False
        if self._windowed is None:
            return True
        needed = self._needed_from(position)
        held = self._windowed.positions_of(seq, needed, position)
        return np.array_equal(held, self._base.positions_of(seq, needed, position))

    def _needed_from(self, position: int) -> int:
        """The first window row that going on at `position` needs, in any layer."""
        return min((window.needed_from(position) for window in self._windows), default=position)

    def free_cells(self) -> int:
        return min(int(table.takeable().sum()) for table in self._tables)

    def tokens_at(self, seq: SeqId, start: int, stop: int) -> tuple[int, ...]:
        cells = self._base.cells_of(seq, start, stop)
        return tuple(self._base.tokens[cells].tolist())

    # -- states ------------------------------------------------------------------------------------

    def snapshot(self, seq: SeqId, since: int = 0) -> tuple[tuple[Rows, ...], tuple[Point, ...]]:
        self._idle()
        length = self._base.next_position(seq)
        if not np.array_equal(self._base.positions_of(seq), np.arange(length)):
            raise EditRefused(f"positions of sequence {seq} have holes: it has no state that can be saved")
        return snapshot_rows(self._parts, seq, since), ()

    def restore(
        self, seq: SeqId, tokens: tuple[int, ...], rows: tuple[Rows, ...], points: tuple[Point, ...]
    ) -> None:
        self._idle()
        if self._base.next_position(seq):
            raise EditRefused(f"sequence {seq} is not empty")
        restore_rows(self._parts, self._tables, seq, tokens, rows, points, self._needed_from(len(tokens)))


def build_kv(spec: MemorySpec) -> KvMemory:
    """Every layer as long as the context."""
    return KvMemory(spec, CellTable(spec.num_cells, spec.num_seqs), None)
