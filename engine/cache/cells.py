"""The cell table: which cell of a cache holds which position of which sequences.

A cell has one position and any number of owners, so a shared prefix costs nothing. An edit of some owners'
positions moves them to a copy of the cell; the other owners notice nothing. All state is numpy arrays on
the host and every operation is vectorised over cells; loops run over sequences at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.batch import Bools, Ints
from engine.errors import EditRefused, NoSlot
from engine.state import SeqId


@dataclass(frozen=True, slots=True)
class Saved:
    """What some cells were before an `occupy`: enough to put them back exactly."""

    cells: Ints
    positions: Ints
    tokens: Ints
    grid: Ints
    order: Ints
    owners: Bools
    clock: int


@dataclass(frozen=True, slots=True)
class Move:
    """A planned change of positions: the owners `movers` [num_seqs] of `sources[i]` go to `targets[i]`.

    Where the two differ the target is a free cell, and the rows of the source must be copied to it.
    `deltas` are new minus old positions; `dropped` cells would get a negative position and are left.
    """

    movers: Bools
    sources: Ints
    targets: Ints
    positions: Ints
    deltas: Ints
    dropped: Ints


def anyone(owners: Bools) -> Bools:
    """Whether each cell has an owner, of `owners` [num_seqs, cells]."""
    owned: Bools = np.logical_or.reduce(owners, axis=0)
    return owned


def largest_gap(free: Bools, count: int) -> int | None:
    """Where `count` cells would best begin in the largest run of free ones: with as much room before them,
    for the neighbour there, as behind; at the start of an empty table. None if no cell is free."""
    edges = np.flatnonzero(np.diff(free.astype(np.int8), prepend=0, append=0))
    starts, lengths = edges[::2], edges[1::2] - edges[::2]
    if not starts.size:
        return None
    largest = int(np.argmax(lengths))
    start, length = int(starts[largest]), int(lengths[largest])
    if start == 0:
        return 0
    return start + max(0, length - count) // 2


class CellTable:
    """Cells of one cache, or of several that share it by reference.

    With a `window`, cells more than `window` positions behind the end of every owner may be taken for
    new tokens; they stay readable until they are. Taking one drops all earlier positions of its owners,
    so that what a sequence holds is always one range without holes.
    """

    def __init__(self, num_cells: int, num_seqs: int, window: int | None = None) -> None:
        self.num_cells = num_cells
        self.num_seqs = num_seqs
        self.window = window
        self.owners: Bools = np.zeros((num_seqs, num_cells), np.bool_)
        self.positions: Ints = np.zeros(num_cells, np.int64)
        self.tokens: Ints = np.zeros(num_cells, np.int64)
        self.grid: Ints = np.zeros((num_cells, 2), np.int64)
        #: age of the token in a cell: sorts tokens that `divide` put at one position
        self.order: Ints = np.zeros(num_cells, np.int64)
        self.clock = 0

    # -- questions ---------------------------------------------------------------------------------

    def cells_of(self, seq: SeqId, start: int = 0, stop: int | None = None) -> Ints:
        """Cells of a sequence's positions [start, stop), in position order."""
        cells = np.flatnonzero(self.owners[seq])
        positions = self.positions[cells]
        if start > 0 or stop is not None:
            inside = positions >= start
            if stop is not None:
                inside &= positions < stop
            cells, positions = cells[inside], positions[inside]
        if bool((positions[1:] > positions[:-1]).all()):
            return cells
        return cells[np.lexsort((self.order[cells], positions))]

    def positions_of(self, seq: SeqId, start: int = 0, stop: int | None = None) -> Ints:
        """Positions that a sequence holds in [start, stop), in order."""
        return self.positions[self.cells_of(seq, start, stop)]

    def pos_min(self, seq: SeqId) -> int | None:
        held = self.positions[self.owners[seq]]
        return int(held.min()) if held.size else None

    def pos_max(self, seq: SeqId) -> int | None:
        held = self.positions[self.owners[seq]]
        return int(held.max()) if held.size else None

    def next_position(self, seq: SeqId) -> int:
        """Where the next token of a sequence goes."""
        last = self.pos_max(seq)
        return 0 if last is None else last + 1

    def held_range(self, seq: SeqId) -> tuple[int, int]:
        """The longest range [start, stop) without a hole that ends at the sequence's end."""
        positions = self.positions_of(seq)
        if not positions.size:
            return 0, 0
        holes = np.flatnonzero(np.diff(positions) > 1)
        first = positions[holes[-1] + 1] if holes.size else positions[0]
        return int(first), int(positions[-1]) + 1

    def takeable(self) -> Bools:
        """Cells that a new token could take: free ones, and those that no owner needs any more."""
        if self.window is None:
            return ~anyone(self.owners)
        ends = np.where(self.owners, self.positions + 1, 0).max(1)
        needed = self.owners & (self.positions >= (ends - self.window)[:, None])
        return ~anyone(needed)

    # -- finding room ------------------------------------------------------------------------------

    def find_slot(self, requests: Sequence[tuple[SeqId, int]]) -> list[Ints]:
        """Cells for `count` new tokens of each (seq, count), in token order. Changes nothing.

        A sequence goes on right behind its last cell where it can, so that a lone one is contiguous. A
        new one, or one that is stopped by another's cells, starts in the middle of the largest gap, where
        its neighbours and it have room.
        Raises NoSlot if they do not all fit.
        """
        free = ~anyone(self.owners)
        takeable = free if self.window is None else self.takeable()
        wanted, room = sum(count for _, count in requests), int(takeable.sum())
        if wanted > room:
            raise NoSlot(f"no room for {wanted} tokens: {room} of {self.num_cells} cells can be taken")
        found = []
        for seq, count in requests:
            starts = [start for start in (self._behind(seq), largest_gap(free, count)) if start is not None]
            for start in starts:
                if start + count <= self.num_cells and bool(free[start : start + count].all()):
                    cells = np.arange(start, start + count)
                    break
            else:
                cells = self._scattered(starts[0] if starts else 0, count, free, takeable)
            free[cells] = False
            takeable[cells] = False
            found.append(cells)
        return found

    def _behind(self, seq: SeqId) -> int | None:
        """The cell after the last one of a sequence, if it has any; the first cell follows the last."""
        own = np.flatnonzero(self.owners[seq])
        if not own.size:
            return None
        last = own[np.argmax(self.positions[own])]
        return (int(last) + 1) % self.num_cells

    def _scattered(self, start: int, count: int, free: Bools, takeable: Bools) -> Ints:
        """Free cells, round from `start`, and when they are used up the stalest of the takeable."""
        cells = np.roll(np.flatnonzero(free), -int(free[:start].sum()))[:count]
        if len(cells) == count:
            return cells
        stale = np.flatnonzero(takeable & ~free)
        owners = self.owners[:, stale]
        ends = np.where(self.owners, self.positions + 1, 0).max(1)
        # Several owners: the cell is as fresh as the one that dropped it last finds it.
        age = np.where(owners, ends[:, None] - self.positions[stale], np.iinfo(np.int64).max).min(0)
        stale = stale[np.argsort(-age, kind="stable")]
        return np.concatenate((cells, stale[: count - len(cells)]))

    # -- tokens in ---------------------------------------------------------------------------------

    def occupy(self, cells: Ints, seqs: Ints, positions: Ints, tokens: Ints, grid: Ints | None) -> Saved:
        """Put `tokens[i]` of `seqs[i]` at `positions[i]` into `cells[i]`; returns what was there.

        Owners that lose a cell also lose every position up to it.
        """
        lost = self.owners[:, cells]
        changed = cells
        purged = np.zeros_like(self.owners[0])
        for loser in np.flatnonzero(lost.any(1)):
            highest = self.positions[cells[lost[loser]]].max()
            purged |= self.owners[loser] & (self.positions <= highest)
        if bool(purged.any()):
            changed = np.union1d(cells, np.flatnonzero(purged))
        saved = self._save(changed)
        for loser in np.flatnonzero(lost.any(1)):
            highest = self.positions[cells[lost[loser]]].max()
            self.owners[loser] &= self.positions > highest
        self.owners[seqs, cells] = True
        self.positions[cells] = positions
        self.tokens[cells] = tokens
        self.grid[cells] = 0 if grid is None else grid
        self.order[cells] = np.arange(self.clock, self.clock + len(cells))
        self.clock += len(cells)
        return saved

    def put_back(self, saved: Saved) -> None:
        """Undo an `occupy`, the last first."""
        self.owners[:, saved.cells] = saved.owners
        self.positions[saved.cells] = saved.positions
        self.tokens[saved.cells] = saved.tokens
        self.grid[saved.cells] = saved.grid
        self.order[saved.cells] = saved.order
        self.clock = saved.clock

    def _save(self, cells: Ints) -> Saved:
        return Saved(
            cells,
            self.positions[cells],
            self.tokens[cells],
            self.grid[cells],
            self.order[cells],
            self.owners[:, cells],
            self.clock,
        )

    # -- edits -------------------------------------------------------------------------------------

    def remove(self, seq: SeqId | None, start: int, stop: int | None) -> None:
        """Forget positions [start, stop) of a sequence, or of all."""
        chosen = self._chosen(seq)
        self.owners[chosen] &= ~self._inside(start, stop)

    def copy(self, source: SeqId, target: SeqId, start: int, stop: int | None) -> None:
        """`target`, emptied, becomes a further owner of the cells of `source` in the range."""
        self.owners[target] = self.owners[source] & self._inside(start, stop)

    def keep(self, seq: SeqId) -> None:
        """Forget every other sequence."""
        self.owners[np.arange(self.num_seqs) != seq] = False

    def plan_move(
        self, seq: SeqId | None, start: int, stop: int | None, moved: Callable[[Ints], Ints]
    ) -> Move:
        """What it takes to put positions [start, stop) at `moved(positions)`. Changes nothing.

        Raises EditRefused where a moved token would land on one that stays, NoSlot where cells that
        other sequences own have no room to be copied to.
        """
        movers = self._chosen(seq)
        cells = np.flatnonzero(self.owners[movers].any(0) & self._inside(start, stop))
        positions = moved(self.positions[cells])
        deltas = positions - self.positions[cells]
        self._refuse_collisions(movers, cells, positions)
        dropped, stay = cells[positions < 0], (positions >= 0) & (deltas != 0)
        sources, positions, deltas = cells[stay], positions[stay], deltas[stay]
        shared = self.owners[:, sources][~movers].any(0)
        targets, count = sources.copy(), int(shared.sum())
        if count:
            targets[shared] = self.find_slot([(SeqId(int(np.flatnonzero(movers)[0])), count)])[0]
        return Move(movers, sources, targets, positions, deltas, dropped)

    def apply_move(self, move: Move) -> None:
        """Carry out a planned move; its targets get the metadata of its sources and the new positions."""
        leaving = move.movers[:, None]
        moved = self.owners[:, move.sources] & leaving
        self.owners[:, move.dropped] &= ~leaving
        self.owners[:, move.sources] &= ~leaving
        self.owners[:, move.targets] = moved
        for values in (self.tokens, self.grid, self.order):
            values[move.targets] = values[move.sources]
        self.positions[move.targets] = move.positions

    def _refuse_collisions(self, movers: Bools, cells: Ints, positions: Ints) -> None:
        for seq in np.flatnonzero(movers):
            staying = self.owners[seq].copy()
            staying[cells] = False
            both = np.intersect1d(self.positions[staying], positions[self.owners[seq, cells]])
            if both.size:
                raise EditRefused(f"two tokens of sequence {seq} would be at position {both[0]}")

    def _chosen(self, seq: SeqId | None) -> Bools:
        if seq is None:
            return np.ones(self.num_seqs, np.bool_)
        chosen: Bools = np.arange(self.num_seqs) == seq
        return chosen

    def _inside(self, start: int, stop: int | None) -> Bools:
        inside: Bools = self.positions >= start
        if stop is not None:
            inside &= self.positions < stop
        return inside
