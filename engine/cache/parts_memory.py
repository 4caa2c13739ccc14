"""One memory for the whole family: parts of the four kinds over shared tables, changed together or not at
all.

Which parts there are is the model's to say and the table of kinds' to check; nothing here asks for a kind.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch

from engine.batch import Batch, Ints, Ubatch, counts_of, split_equal, split_placed, split_simple
from engine.cache.cells import CellTable, Move
from engine.cache.checks import check_points
from engine.cache.memory import MemorySpec
from engine.cache.parts import Parts, RowsPart, Tables
from engine.cache.plan import PartsPlan, Undo
from engine.cache.points import Checkpoints, Frozen
from engine.cache.rows import Slot
from engine.cache.snapshots import restore_parts, snapshot_rows
from engine.cache.trail import Steps, Trails
from engine.cache.view import PartsView
from engine.errors import BatchRefused, EditRefused
from engine.state import Layout, Point, Rows, Run, SeqId


class PartsMemory:
    """See `memory.Memory`."""

    def __init__(self, spec: MemorySpec, base: CellTable, windowed: CellTable | None) -> None:
        self._spec = spec
        self._tables = Tables(spec, base, windowed)
        self._parts = Parts(spec, self._tables)
        self._checkpoints = Checkpoints(spec.num_seqs, spec.checkpoint_bytes)
        self._trails = Trails(spec.num_seqs, spec.rollback, self._parts.points)
        windows = {part.need.window for part in self._parts.rows.values()}
        self._windows = tuple(window for window in windows if window is not None)
        self._plan: PartsPlan | None = None

    @property
    def layout(self) -> Layout:
        return self._parts.layout

    @property
    def rotated(self) -> tuple[str, ...]:
        return self._parts.rotated

    # -- tokens in ---------------------------------------------------------------------------------

    def plan(self, batch: Batch) -> PartsPlan:
        self._idle()
        self._check(batch)
        spec = self._spec
        self._plan = PartsPlan(
            batch, self._cut(batch), self._parts, self._tables, self._trails, spec.device, self._ended
        )
        return self._plan

    def _cut(self, batch: Batch) -> tuple[Ubatch, ...]:
        spec = self._spec
        match bool(self._parts.points), spec.deterministic:
            case False, False:
                return split_simple(batch, spec.max_ubatch)
            case False, True:
                return split_placed(batch, spec.max_ubatch)
            case True, False:
                return split_equal(batch, spec.max_ubatch, self._keep_tail)
            case _:
                return split_simple(batch, 1)

    @property
    def _keep_tail(self) -> int:
        """In one pass, so that the passes before it have no states to hand over but their last."""
        spec = self._spec
        tail = spec.rollback + 1
        return max(spec.keep_tail, tail) if spec.rollback and tail <= spec.max_ubatch else spec.keep_tail

    def _ended(self, plan: PartsPlan) -> None:
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
            first = self._length(seq)
            positions = batch.positions[batch.seqs == seq]
            if not np.array_equal(positions, np.arange(first, first + count)):
                raise BatchRefused(f"positions of sequence {seq} must go on at {first} without a hole")

    # -- edits -------------------------------------------------------------------------------------

    def remove(self, seq: SeqId | None, start: int, stop: int | None) -> None:
        self._idle()
        ends = {}
        for one in self._chosen(seq):
            end = self._length(one)
            last = end if stop is None else min(stop, end)
            if start >= last:
                continue
            if last < end:
                self._refuse_hole()
            elif not self.can_resume_at(one, start):
                raise EditRefused(f"sequence {one} cannot go on at {start}: {self._lacks(one, start)}")
            ends[one] = last
        for table in self._tables.of_tokens:
            table.remove(seq, start, stop)
        for one in ends:
            for size, blocks in self._tables.blocks.items():
                blocks.remove(one, start // size, None)
            if self._parts.points:
                self._set_points(one, self._point_at(one, start))
                self._checkpoints.cut(one, start)
                self._trails.cut(one, start)

    def copy(self, source: SeqId, target: SeqId, start: int = 0, stop: int | None = None) -> None:
        self._idle()
        if source == target:
            raise EditRefused(f"sequence {source} cannot be copied onto itself")
        end = self._length(source)
        stop = end if stop is None else min(stop, end)
        if start > 0:
            self._refuse_hole()
        elif not self.can_resume_at(source, stop):
            lacks = self._lacks(source, stop)
            raise EditRefused(f"sequence {source} cannot be copied up to {stop}: {lacks}")
        for table in self._tables.of_tokens:
            table.copy(source, target, start, stop)
        for size, blocks in self._tables.blocks.items():
            blocks.copy(source, target, 0, stop // size)
        if self._parts.points:
            live = stop == end and stop > 0
            self._set_points(target, self._freeze(source) if live else self._point_at(source, stop))
            self._checkpoints.copy(source, target, stop)
            self._trails.copy(source, target, stop)

    def keep(self, seq: SeqId) -> None:
        self._idle()
        for table, _ in self._tables:
            table.keep(seq)
        for one in self._chosen(None):
            if one != seq:
                self._set_points(one, None)
                self._checkpoints.cut(one, 0)
                self._trails.cut(one, 0)

    def shift(self, seq: SeqId | None, start: int, stop: int | None, delta: int) -> None:
        def moved(positions: Ints) -> Ints:
            return positions + delta

        self._move([table.plan_move(seq, start, stop, moved) for table in self._movable()])

    def discard(self, seq: SeqId, start: int, stop: int) -> None:
        tables = self._movable()
        left = self._length(seq) - (stop - start)
        if not self._has_window_rows(seq, self._needed_from(left), start):
            # A restored sequence has no older ones than it needed, and a shorter one can need them.
            raise EditRefused(f"sequence {seq} cannot go on at {left}: its window rows are gone")
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
        if self._parts.points:
            return "its recurrent state cannot forget a token that it has read"
        if self._parts.blocks:
            return "rows of closed blocks cannot be moved"
        if self._has_short_window():
            return "rows that its sliding windows have dropped cannot be moved (full_windows keeps them)"
        return None

    def _movable(self) -> tuple[CellTable, ...]:
        self._idle()
        refusal = self.refuse_shift()
        if refusal is not None:
            raise EditRefused(refusal)
        return self._tables.of_tokens

    def _move(self, moves: list[Move]) -> None:
        """Carry out one move a table: rows first, while the sources are still where they were."""
        for table, move in zip(self._tables.of_tokens, moves, strict=True):
            copied = move.sources != move.targets
            for part in self._parts.rows.values():
                if part.table is table:
                    self._move_rows(part, move, copied)
            table.apply_move(move)

    def _move_rows(self, part: RowsPart, move: Move, copied: np.ndarray) -> None:
        """What RoPE turned is turned by how far it moves, in float32 and un-rotated; the rest is copied if
        at all."""
        device, turned, buffer = self._spec.device, part.need.turned, part.buffer
        if turned is None:
            source, target = Slot.of(move.sources[copied], device), Slot.of(move.targets[copied], device)
            if len(source):
                buffer.write_bytes(target, buffer.read_bytes(source))
        elif len(move.sources):
            rows = buffer.read_plain(Slot.of(move.sources, device)).clone()
            values = slice(turned.start, turned.start + turned.rotary.n_rot)
            deltas = torch.from_numpy(move.deltas)
            rows[..., values] = turned.rotary.rerotate(rows[..., values], deltas)
            buffer.write(Slot.of(move.targets, device), rows)

    def _refuse_hole(self) -> None:
        """Raises EditRefused where only the end of a sequence can go."""
        if self._parts.points:
            raise EditRefused("only the end of a sequence can be removed from a recurrent state")
        if self._parts.blocks:
            raise EditRefused("only the end of a sequence can be removed from closed blocks")
        if self._has_short_window():
            raise EditRefused("only the end of a sequence can be removed from a sliding window")

    def _has_short_window(self) -> bool:
        return any(table.window is not None for table in self._tables.of_tokens)

    def _chosen(self, seq: SeqId | None) -> list[SeqId]:
        return [seq] if seq is not None else [SeqId(i) for i in range(self._spec.num_seqs)]

    # -- point state -------------------------------------------------------------------------------

    def mark(self, seq: SeqId) -> None:
        self._idle()
        length = self._length(seq)
        if self._parts.points and length and self._checkpoints.at(seq, length) is None:
            self._checkpoints.add(seq, length, self._freeze(seq))

    def _freeze(self, seq: SeqId) -> Frozen:
        return tuple(part.buffer.read_bytes(seq) for part in self._parts.points.values())

    def _point_at(self, seq: SeqId, position: int) -> Frozen | None:
        """The state that was kept of a position before the end."""
        kept = self._trails.at(seq, position)
        return self._checkpoints.at(seq, position) if kept is None else kept

    def _set_points(self, seq: SeqId, frozen: Frozen | None) -> None:
        """None: as before the first token."""
        for index, part in enumerate(self._parts.points.values()):
            if frozen is None:
                part.buffer.clear(seq)
            else:
                part.buffer.write_bytes(seq, frozen[index])

    # -- questions ---------------------------------------------------------------------------------

    def _length(self, seq: SeqId) -> int:
        return self._tables.base.next_position(seq)

    def pos_min(self, seq: SeqId) -> int | None:
        return self._tables.base.pos_min(seq)

    def pos_max(self, seq: SeqId) -> int | None:
        return self._tables.base.pos_max(seq)

    def can_resume_at(self, seq: SeqId, position: int) -> bool:
        length = self._length(seq)
        return 0 <= position <= length and self._has_point(seq, position) and self._has_window(seq, position)

    def last_resumable(self, seq: SeqId, at_most: int) -> int:
        length = self._length(seq)
        at_most = min(at_most, length)
        if not self._parts.points:
            # Who goes back further needs window rows that are older still.
            return at_most if self._has_window(seq, at_most) else 0
        kept = {*self._checkpoints.positions(seq), *self._trails.positions(seq), length}
        candidates = (at for at in sorted(kept, reverse=True) if at <= at_most)
        return next((at for at in candidates if self.can_resume_at(seq, at)), 0)

    def _has_point(self, seq: SeqId, position: int) -> bool:
        if not self._parts.points or position in (0, self._length(seq)):
            return True
        return position in self._trails.positions(seq) or self._checkpoints.at(seq, position) is not None

    def _has_window(self, seq: SeqId, position: int) -> bool:
        return self._has_window_rows(seq, self._needed_from(position), position)

    def _has_window_rows(self, seq: SeqId, start: int, stop: int) -> bool:
        windowed = self._tables.windowed
        if windowed is None:
            return True
        held = windowed.positions_of(seq, start, stop)
        return np.array_equal(held, self._tables.base.positions_of(seq, start, stop))

    def _lacks(self, seq: SeqId, position: int) -> str:
        if not self._has_point(seq, position):
            nearest, trail = self.last_resumable(seq, position), self._trails.positions(seq)
            since = f", and the last batch left its states from {trail.start} on" if trail else ""
            return f"there is no checkpoint{since}; the nearest before is {nearest}"
        return "its window rows are gone"

    def _needed_from(self, position: int) -> int:
        """The first window row that going on at `position` needs, in any layer."""
        return min((window.needed_from(position) for window in self._windows), default=position)

    def drops_rows(self) -> bool:
        windowed = self._tables.windowed
        return windowed is not None and windowed.num_cells < self._tables.base.num_cells

    def free_cells(self) -> int:
        return min(int(table.takeable().sum()) for table in self._tables.of_tokens)

    def tokens_at(self, seq: SeqId, start: int, stop: int) -> tuple[int, ...]:
        base = self._tables.base
        return tuple(base.tokens[base.cells_of(seq, start, stop)].tolist())

    # -- for who borrows ---------------------------------------------------------------------------

    @property
    def spec(self) -> MemorySpec:
        return self._spec

    def has_part(self, name: str, layer: int) -> bool:
        return (name, layer) in self._parts.rows

    def can_read_at(self, seq: SeqId, position: int, layers: Collection[int]) -> bool:
        """Whether a token at `position` would find some row in each of `layers`, and all that it may see."""
        length, at = self._length(seq), np.array([position])
        parts = (part for part in self._parts.rows.values() if part.need.layer in layers)
        windows = {part.need.window for part in parts}
        firsts = [int(window.first_visible(at)[0]) for window in windows if window is not None]
        return (
            0 <= position <= length
            and max(firsts, default=0) < length
            and all(self._has_window_rows(seq, first, position + 1) for first in firsts)
        )

    def lend(self, ubatch: Ubatch) -> PartsView:
        """A view for tokens that get no cells. What would store something must not be called."""
        self._idle()
        return PartsView(ubatch, self._parts, self._tables.base, {}, {}, Undo(), Steps())

    # -- states ------------------------------------------------------------------------------------

    def snapshot(self, seq: SeqId, since: int = 0) -> tuple[tuple[Rows, ...], tuple[Point, ...]]:
        self._idle()
        base, length = self._tables.base, self._length(seq)
        if not np.array_equal(base.positions_of(seq), np.arange(length)):
            raise EditRefused(f"positions of sequence {seq} have holes: it has no state that can be saved")
        return snapshot_rows(self._parts, seq, since, length), self._points(seq, since, length)

    def _points(self, seq: SeqId, since: int, length: int) -> tuple[Point, ...]:
        """Checkpoints after `since`, and the live state."""
        if not self._parts.points or not length:
            return ()
        kept = {at: self._checkpoints.at(seq, at) for at in self._checkpoints.positions(seq)}
        earlier = [Point(at, frozen) for at, frozen in kept.items() if since < at < length and frozen]
        return (*earlier, Point(length, self._freeze(seq)))

    def restore(
        self, seq: SeqId, tokens: tuple[int, ...], rows: Sequence[Run], points: tuple[Point, ...]
    ) -> None:
        self._idle()
        if self._length(seq):
            raise EditRefused(f"sequence {seq} is not empty")
        self.replace(seq, tokens, rows, points)

    def replace(
        self, seq: SeqId, tokens: tuple[int, ...], rows: Sequence[Run], points: tuple[Point, ...]
    ) -> None:
        self._idle()
        length, before = len(tokens), self._freeze(seq)
        frozen = check_points(tuple(part.spec for part in self._parts.points.values()), points, length)
        try:
            self._set_points(seq, frozen.get(length))
            restore_parts(self._parts, self._tables, seq, tokens, rows, self._needed_from(length))
        except BaseException:
            self._set_points(seq, before)
            raise
        self._checkpoints.cut(seq, 0)
        self._trails.cut(seq, 0)
        for position, kept in frozen.items():
            self._checkpoints.add(seq, position, kept)
