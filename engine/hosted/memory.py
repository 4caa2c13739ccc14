"""The memory of a hosted model: a cache of transformers for each sequence.

Sequences share nothing but what a fork has not replaced yet, and each is computed alone: what others share a
batch with it leaves no mark on its bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np

from engine.batch import Batch, Ubatch, counts_of, split_apart
from engine.cache.checks import check_points, check_runs
from engine.cache.memory import MemorySpec, View
from engine.cache.points import Checkpoints, Frozen
from engine.errors import BatchRefused, EditRefused, NoSlot, StateError
from engine.hosted.geometry import Geometry
from engine.hosted.sequence import HostedSequence, read
from engine.state import Layout, PartKind, Point, Rows, Run, SeqId

_NO_SHIFT = "a model of transformers keeps keys that cannot be turned to other positions"


class HostedView:
    """One applied ubatch: the sequence that its tokens are of, for the model to put them through."""

    def __init__(self, sequence: HostedSequence, before: HostedSequence) -> None:
        self.sequence = sequence
        self._before = before

    def done(self, tokens: Sequence[int]) -> None:
        """`tokens` went through the sequence's cache."""
        self.sequence.grow(self._before, tokens)


class HostedPlan:
    """See `memory.Plan`. A sequence that is to grow is a fork of the one that was, until the plan ends."""

    def __init__(
        self,
        ubatches: tuple[Ubatch, ...],
        sequences: list[HostedSequence],
        ended: Callable[[dict[SeqId, HostedSequence]], None],
    ) -> None:
        self.ubatches = ubatches
        self._sequences = sequences
        self._before: dict[SeqId, HostedSequence] = {}
        self._ended = ended

    def apply(self, index: int) -> View:
        seq = self.ubatches[index].segments[0].seq
        before = self._sequences[seq]
        self._before.setdefault(seq, before)
        self._sequences[seq] = before.fork()
        # What is applied is for the model of this memory alone to look at, and that asks nothing else of it.
        return cast(View, HostedView(self._sequences[seq], before))

    def commit(self) -> None:
        self._ended({})

    def rollback(self) -> None:
        self._ended(self._before)


class HostedMemory:
    """See `memory.Memory`. With `singly` the model reads right only what it reads at once into an empty
    cache: what follows goes in token by token."""

    def __init__(self, geometry: Geometry, spec: MemorySpec, singly: bool) -> None:
        self._geometry = geometry
        self._spec = spec
        self._singly = singly
        self._sequences = [HostedSequence.empty(geometry) for _ in range(spec.num_seqs)]
        self._checkpoints = Checkpoints(spec.num_seqs, spec.checkpoint_bytes)
        self._planned = False

    @property
    def layout(self) -> Layout:
        return self._geometry.layout

    @property
    def rotated(self) -> tuple[str, ...]:
        return ()

    # --- tokens in ----------------------------------------------------------------------------

    def plan(self, batch: Batch) -> HostedPlan:
        self._idle()
        if not 0 < len(batch) <= self._spec.max_batch:
            raise BatchRefused(f"a batch of {len(batch)} tokens: it can have 1 to {self._spec.max_batch}")
        for seq, count in counts_of(batch):
            if not 0 <= seq < self._spec.num_seqs:
                raise BatchRefused(f"no sequence {seq}: there are {self._spec.num_seqs}")
            first = self._sequences[seq].length
            if not np.array_equal(batch.positions[batch.seqs == seq], np.arange(first, first + count)):
                raise BatchRefused(f"positions of sequence {seq} must go on at {first} without a hole")
        self._check_room(len(batch))
        self._planned = True
        return HostedPlan(split_apart(batch, self._cuts), self._sequences, self._end)

    def _cuts(self, seq: SeqId, count: int) -> Iterator[int]:
        """How many tokens go in at once. Of more than a window has, some rows would be dropped unseen."""
        most, begins = self._spec.max_ubatch, not self._sequences[seq].length
        if self._geometry.windows:
            most = min(most, self._geometry.window)
        while count:
            cut = min(count, 1 if self._singly and not begins else most)
            yield cut
            count, begins = count - cut, False

    def _end(self, back: dict[SeqId, HostedSequence]) -> None:
        for seq, sequence in back.items():
            self._sequences[seq] = sequence
        self._planned = False

    def _idle(self) -> None:
        assert not self._planned, "the plan before has not ended"

    def _check_room(self, count: int, in_place_of: int = 0) -> None:
        if count > self.free_cells() + in_place_of:
            raise NoSlot(f"no room for {count:,} tokens: {self.free_cells():,} of {self._spec.num_cells:,}")

    # --- edits --------------------------------------------------------------------------------

    def remove(self, seq: SeqId | None, start: int, stop: int | None) -> None:
        self._idle()
        chosen = [seq] if seq is not None else [SeqId(at) for at in range(self._spec.num_seqs)]
        cut = {}
        for one in chosen:
            length = self._sequences[one].length
            last = length if stop is None else min(stop, length)
            if start < last < length:
                raise EditRefused("only the end of a sequence can be removed from a cache of transformers")
            if start < last:
                cut[one] = self._cut(one, start)
        for one, sequence in cut.items():
            self._sequences[one] = sequence
            self._checkpoints.cut(one, start)

    def copy(self, source: SeqId, target: SeqId, start: int = 0, stop: int | None = None) -> None:
        self._idle()
        if source == target:
            raise EditRefused(f"sequence {source} cannot be copied onto itself")
        if start > 0:
            raise EditRefused("a cache of transformers can be copied from its beginning alone")
        length = self._sequences[source].length
        stop = length if stop is None else min(stop, length)
        self._check_room(stop, self._sequences[target].length)
        self._sequences[target] = self._cut(source, stop)
        self._checkpoints.copy(source, target, stop)

    def _cut(self, seq: SeqId, length: int) -> HostedSequence:
        if not self.can_resume_at(seq, length):
            nearest = self.last_resumable(seq, length)
            raise EditRefused(
                f"sequence {seq} cannot go on at {length}: it has no checkpoint, the nearest is at {nearest}"
            )
        sequence = self._sequences[seq]
        here = not self._geometry.states and sequence.has_window(length)
        return sequence.cut(length, None if here else self._checkpoints.at(seq, length))

    def keep(self, seq: SeqId) -> None:
        for other in range(self._spec.num_seqs):
            if other != seq:
                self.remove(SeqId(other), 0, None)

    def shift(self, seq: SeqId | None, start: int, stop: int | None, delta: int) -> None:
        raise EditRefused(_NO_SHIFT)

    def discard(self, seq: SeqId, start: int, stop: int) -> None:
        raise EditRefused(_NO_SHIFT)

    def divide(self, seq: SeqId | None, start: int, stop: int | None, divisor: int) -> None:
        raise EditRefused(_NO_SHIFT)

    def refuse_shift(self) -> str | None:
        return _NO_SHIFT

    # --- questions ----------------------------------------------------------------------------

    def pos_min(self, seq: SeqId) -> int | None:
        return 0 if self._sequences[seq].tokens else None

    def pos_max(self, seq: SeqId) -> int | None:
        return self._sequences[seq].length - 1 if self._sequences[seq].tokens else None

    def can_resume_at(self, seq: SeqId, position: int) -> bool:
        sequence = self._sequences[seq]
        if position in (0, sequence.length):
            return True
        if not 0 < position < sequence.length:
            return False
        here = not self._geometry.states and sequence.has_window(position)
        return here or self._checkpoints.at(seq, position) is not None

    def last_resumable(self, seq: SeqId, at_most: int) -> int:
        at_most = min(at_most, self._sequences[seq].length)
        if self.can_resume_at(seq, at_most):
            return at_most
        return max((at for at in self._checkpoints.positions(seq) if at <= at_most), default=0)

    def drops_rows(self) -> bool:
        """Checkpoints have the window rows, too."""
        return False

    def mark(self, seq: SeqId) -> None:
        self._idle()
        sequence = self._sequences[seq]
        keeps = self._geometry.states or self._geometry.windows
        if keeps and sequence.length and self._checkpoints.at(seq, sequence.length) is None:
            self._checkpoints.add(seq, sequence.length, sequence.freeze())

    def free_cells(self) -> int:
        return self._spec.num_cells - sum(sequence.length for sequence in self._sequences)

    def tokens_at(self, seq: SeqId, start: int, stop: int) -> tuple[int, ...]:
        return tuple(self._sequences[seq].tokens[start:stop])

    # --- states -------------------------------------------------------------------------------

    def snapshot(self, seq: SeqId, since: int = 0) -> tuple[tuple[Rows, ...], tuple[Point, ...]]:
        self._idle()
        sequence = self._sequences[seq]
        if not sequence.length:
            return (), ()
        return sequence.rows(since), self._points(seq, since) if self._geometry.states else ()

    def _points(self, seq: SeqId, since: int) -> tuple[Point, ...]:
        """Checkpoints after `since`, and the live state."""
        sequence, num_windows = self._sequences[seq], len(self._geometry.windows)
        kept = {at: self._checkpoints.at(seq, at) for at in self._checkpoints.positions(seq)}
        earlier = [
            Point(at, frozen[num_windows:])
            for at, frozen in kept.items()
            if since < at < sequence.length and frozen
        ]
        return (*earlier, Point(sequence.length, sequence.points()))

    def restore(
        self, seq: SeqId, tokens: tuple[int, ...], rows: Sequence[Run], points: tuple[Point, ...]
    ) -> None:
        if self._sequences[seq].length:
            raise EditRefused(f"sequence {seq} is not empty")
        self.replace(seq, tokens, rows, points)

    def replace(
        self, seq: SeqId, tokens: tuple[int, ...], rows: Sequence[Run], points: tuple[Point, ...]
    ) -> None:
        self._idle()
        geometry, length = self._geometry, len(tokens)
        frozen = check_points(tuple(state.spec for state in geometry.states), points, length)
        first = self._check_runs(rows, length)
        self._check_room(length, self._sequences[seq].length)
        if not length:
            self._sequences[seq] = HostedSequence.empty(geometry)
            self._checkpoints.cut(seq, 0)
            return
        token_rows = read(geometry, rows, PartKind.TOKEN, 0, length)
        window_rows = read(geometry, rows, PartKind.WINDOW, first, length)
        states = [
            state.tensor(stored)
            for state, stored in zip(geometry.states, frozen.get(length, ()), strict=True)
        ]
        self._sequences[seq] = HostedSequence.made(geometry, tokens, token_rows, window_rows, states)
        self._checkpoints.cut(seq, 0)
        for position, kept in frozen.items():
            if geometry.windows and first > max(0, position - geometry.window):
                continue  # its window rows did not come along
            windows = tuple(
                part.as_bytes(tensor, max(0, position - geometry.window - 1 - first), position - first)
                for part, tensor in zip(geometry.windows, window_rows, strict=True)
            )
            self._checkpoints.add(seq, position, (*windows, *_own(kept)))
        self.mark(seq)

    def _check_runs(self, rows: Sequence[Run], length: int) -> int:
        """The first position that window rows are given from; `length` without any."""
        geometry, firsts = self._geometry, {PartKind.WINDOW: length}
        known = [kind for kind in (PartKind.TOKEN, PartKind.WINDOW) if geometry.rows_of(kind)]
        unknown = {run.kind for run in rows} - set(known)
        if unknown:
            raise StateError(f"the state has {', '.join(sorted(unknown))} rows, which this memory has not")
        for kind in known:
            latest = max(0, length - geometry.window) if kind is PartKind.WINDOW else 0
            runs = [run for run in rows if run.kind is kind]
            firsts[kind] = check_runs(kind, runs, length, latest)
        return firsts[PartKind.WINDOW]


def _own(frozen: Frozen) -> Frozen:
    """A copy with nothing beside it in memory."""
    return tuple(part.clone() for part in frozen)
