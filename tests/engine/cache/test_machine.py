"""Any sequence of verbs, against a model in plain Python that knows neither cells nor tables by number.

The model keeps a list of tokens per sequence. A token is an object, and sequences that share a cell share
the object, so that the number of cells in use is known too. Tables are tiny: they fill up and wrap. What
rows, blocks and point state must be is told from the tokens alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from unittest import TestCase

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.batch import Batch, Ints
from engine.cache.parts_memory import PartsMemory
from engine.cache.table import KINDS
from engine.errors import EditRefused, NoSlot, StateError
from engine.state import PartKind, Point, Rows, SeqId, parts_of
from tests.engine.cache.members import (
    WINDOW,
    check_seen,
    check_stored,
    compute,
    compute_plan,
    everything,
    member_spec,
    tiny_memory,
)

NUM_SEQS, NUM_CELLS, MAX_BATCH = 3, 48, 5
#: room for two or three checkpoints of any kind, and for all
BUDGETS = (150, 2**20)
SEQS = st.integers(0, NUM_SEQS - 1).map(SeqId)
SEQS_OR_ALL = st.none() | SEQS
PLACES = st.integers(0, 20)
STOPS = st.none() | PLACES
#: the sequence of each row of a batch
BATCHES = st.lists(SEQS, min_size=1, max_size=MAX_BATCH)


@dataclass(eq=False)
class Token:
    """A token in a cell: `born` sorts those that `divide` put at one position."""

    id: int
    position: int
    born: int


class Machine(RuleBasedStateMachine):
    """Verbs that every memory has."""

    kind = ""
    full_windows = False

    @initialize(
        max_ubatch=st.integers(1, MAX_BATCH),
        budget=st.sampled_from(BUDGETS),
        tail=st.integers(0, 3),
        rollback=st.integers(0, MAX_BATCH),
        batches=st.lists(BATCHES, max_size=5),
    )
    def start(
        self, max_ubatch: int, budget: int, tail: int, rollback: int, batches: list[list[SeqId]]
    ) -> None:
        self.spec = member_spec(
            self.kind,
            num_cells=NUM_CELLS,
            num_seqs=NUM_SEQS,
            max_batch=MAX_BATCH,
            max_ubatch=max_ubatch,
            full_windows=self.full_windows,
            keep_tail=min(tail, max_ubatch),
            checkpoint_bytes=budget,
            rollback=rollback,
        )
        self.memory = tiny_memory(self.spec)
        kinds = {part.kind for part in self.memory.layout}
        self.has_points = PartKind.POINT in kinds
        self.short_window = PartKind.WINDOW in kinds and not self.full_windows
        self.only_the_end = self.has_points or self.short_window or PartKind.BLOCK in kinds
        self.model: list[list[Token]] = [[] for _ in range(NUM_SEQS)]
        self.marks: list[set[int]] = [set() for _ in range(NUM_SEQS)]
        self.trails: list[set[int]] = [set() for _ in range(NUM_SEQS)]
        self.count = 0
        self.feed(batches)

    # -- tokens in ---------------------------------------------------------------------------------

    @rule(batches=st.lists(BATCHES, min_size=1, max_size=4))
    def feed(self, batches: list[list[SeqId]]) -> None:
        for rows in batches:
            self._feed(rows)

    @rule(seq=SEQS, count=st.integers(1, 12), each=st.integers(1, MAX_BATCH))
    def feed_one(self, seq: SeqId, count: int, each: int) -> None:
        for at in range(0, count, each):
            self._feed([seq] * min(each, count - at))

    def _feed(self, rows: Sequence[SeqId]) -> bool:
        """Whether there was room for a new token for each of `rows`."""
        new, batch = self._next(rows)
        if len(rows) > self._room():
            self._refused(NoSlot, lambda: self.memory.plan(batch))
            return False
        plan = self.memory.plan(batch)
        seen = compute_plan(self.spec, plan)
        plan.commit()
        for seq, token in zip(rows, new, strict=True):
            self.model[seq].append(token)
        lines = {seq: self._line(tokens) for seq, tokens in enumerate(self.model)}
        for ubatch, one in zip(plan.ubatches, seen, strict=True):
            check_seen(self.spec, ubatch, one, lines, self.memory)
        for one in {*rows}:
            end, most = self._end(one), min(self.spec.rollback, rows.count(one) - 1)
            self.trails[one] = {end - back for back in range(1, most + 1)}
        return True

    @rule(seq=SEQS, drafted=st.integers(0, MAX_BATCH - 1), accepted=st.integers(0, MAX_BATCH - 1))
    def draft(self, seq: SeqId, drafted: int, accepted: int) -> None:
        """A token and guesses behind it in one batch, of which some stay."""
        self._draft([seq], drafted, accepted)

    @rule(
        seqs=st.permutations([*map(SeqId, range(NUM_SEQS))]),
        drafted=st.integers(1, 2),
        accepted=st.integers(0, 2),
    )
    def draft_side_by_side(self, seqs: list[SeqId], drafted: int, accepted: int) -> None:
        self._draft(seqs[: MAX_BATCH // (1 + drafted)], drafted, accepted)

    def _draft(self, seqs: Sequence[SeqId], drafted: int, accepted: int) -> None:
        if not self._feed([seq for seq in seqs for _ in range(1 + drafted)]):
            return
        rejected = max(0, drafted - accepted)
        for seq in seqs:
            if not self.has_points or rejected <= self.spec.rollback:
                assert self.memory.can_resume_at(seq, self._end(seq) - rejected)
            self.rewind(seq, rejected)

    @rule(rows=BATCHES, applied=st.integers(0, MAX_BATCH))
    def roll_back(self, rows: Sequence[SeqId], applied: int) -> None:
        if len(rows) > self._room():
            return
        before = everything(self.memory)
        plan = self.memory.plan(self._next(rows)[1])
        assert everything(self.memory) == before
        for index, ubatch in enumerate(plan.ubatches[:applied]):
            compute(self.spec, ubatch, plan.apply(index))
        plan.rollback()
        assert everything(self.memory) == before

    @precondition(lambda self: self.has_points)
    @rule(seq=SEQS)
    def mark(self, seq: SeqId) -> None:
        self.memory.mark(seq)
        if self.model[seq]:
            self.marks[seq].add(self._end(seq))
        self._forgotten_marks()

    def _forgotten_marks(self) -> None:
        """Which checkpoints go where there is no room is the memory's to say; never which there are."""
        assert self.memory._checkpoints.nbytes() <= self.spec.checkpoint_bytes
        for seq, marks in enumerate(self.marks):
            held = set(self.memory._checkpoints.positions(SeqId(seq)))
            assert held <= marks
            assert held == marks or self.spec.checkpoint_bytes == BUDGETS[0]
            self.marks[seq] = held

    # -- edits -------------------------------------------------------------------------------------

    @rule(seq=SEQS_OR_ALL, start=PLACES, stop=STOPS)
    def remove(self, seq: SeqId | None, start: int, stop: int | None) -> None:
        refused = False
        for one in self._chosen(seq):
            end = self._end(one)
            last = end if stop is None else min(stop, end)
            if start < last:
                refused |= self.only_the_end if last < end else start not in self._resumable(one)
        if refused:
            self._refused(EditRefused, lambda: self.memory.remove(seq, start, stop))
            return
        self.memory.remove(seq, start, stop)
        for one in self._chosen(seq):
            if stop is None or stop >= self._end(one):
                self.marks[one] = {at for at in self.marks[one] if at <= start}
                self.trails[one] = {at for at in self.trails[one] if at < start}
            self.model[one] = [t for t in self.model[one] if not inside(t, start, stop)]

    @rule(seq=SEQS, back=st.integers(0, WINDOW + 3))
    def rewind(self, seq: SeqId, back: int) -> None:
        """Short ones, which windows allow now and then."""
        self.remove(seq, max(0, self._end(seq) - back), None)

    @precondition(lambda self: self.has_points)
    @rule(seq=SEQS, at_most=PLACES)
    def rewind_to_checkpoint(self, seq: SeqId, at_most: int) -> None:
        self.remove(seq, self.memory.last_resumable(seq, min(at_most, self._end(seq))), None)

    @precondition(lambda self: self._room() < 20)
    @rule(seq=SEQS_OR_ALL)
    def clear(self, seq: SeqId | None) -> None:
        self.memory.remove(seq, 0, None)
        for one in self._chosen(seq):
            self.model[one], self.marks[one], self.trails[one] = [], set(), set()

    @rule(source=SEQS, into=SEQS, start=PLACES | st.just(0), stop=STOPS)
    def copy(self, source: SeqId, into: SeqId, start: int, stop: int | None) -> None:
        last = self._end(source) if stop is None else min(stop, self._end(source))
        bad = self.only_the_end if start else last not in self._resumable(source)
        if source == into or bad:
            self._refused(EditRefused, lambda: self.memory.copy(source, into, start, stop))
            return
        self.memory.copy(source, into, start, stop)
        self.model[into] = [t for t in self.model[source] if inside(t, start, stop)]
        self.marks[into] = {at for at in self.marks[source] if at <= last}
        self.trails[into] = {at for at in self.trails[source] if at < last}

    @rule(source=SEQS, into=SEQS)
    def fork(self, source: SeqId, into: SeqId) -> None:
        self.copy(source, into, 0, None)

    @precondition(lambda self: self._room() < 35)
    @rule(seq=SEQS)
    def keep(self, seq: SeqId) -> None:
        self.memory.keep(seq)
        self.model = [tokens if one == seq else [] for one, tokens in enumerate(self.model)]
        self.marks = [marks if one == seq else set() for one, marks in enumerate(self.marks)]
        self.trails = [trail if one == seq else set() for one, trail in enumerate(self.trails)]

    @precondition(lambda self: self.only_the_end)
    @rule(seq=SEQS, start=PLACES, by=st.integers(1, 6))
    def moves_are_refused(self, seq: SeqId, start: int, by: int) -> None:
        assert self.memory.refuse_shift() is not None
        self._refused(EditRefused, lambda: self.memory.shift(seq, start, None, by))
        self._refused(EditRefused, lambda: self.memory.divide(None, start, None, by))
        self._refused(EditRefused, lambda: self.memory.discard(seq, start, start + by))

    @precondition(lambda self: not self.only_the_end)
    @rule(seq=SEQS_OR_ALL, start=PLACES, stop=STOPS, delta=st.integers(-8, 8))
    def shift(self, seq: SeqId | None, start: int, stop: int | None, delta: int) -> None:
        self._move(seq, start, stop, lambda p: p + delta, lambda: self.memory.shift(seq, start, stop, delta))

    @precondition(lambda self: not self.only_the_end)
    @rule(seq=SEQS_OR_ALL, start=PLACES | st.just(0), stop=STOPS, divisor=st.integers(1, 3))
    def divide(self, seq: SeqId | None, start: int, stop: int | None, divisor: int) -> None:
        self._move(
            seq, start, stop, lambda p: p // divisor, lambda: self.memory.divide(seq, start, stop, divisor)
        )

    def _move(
        self,
        seq: SeqId | None,
        start: int,
        stop: int | None,
        moved: Callable[[int], int],
        verb: Callable[[], None],
    ) -> None:
        assert self.memory.refuse_shift() is None
        movers = self._chosen(seq)
        staying = {id(t) for one in range(NUM_SEQS) if one not in movers for t in self.model[one]}
        new: dict[int, Token] = {}
        copies = 0
        for one in movers:
            touched = [t for t in self.model[one] if inside(t, start, stop)]
            stay = {t.position for t in self.model[one] if not inside(t, start, stop)}
            if stay & {moved(t.position) for t in touched}:
                self._refused(EditRefused, verb)
                return
            for token in touched:
                at = moved(token.position)
                if at != token.position and at >= 0 and id(token) not in new:
                    copies += id(token) in staying
                    new[id(token)] = Token(token.id, at, token.born)
        if copies > self._room():
            self._refused(NoSlot, verb)
            return
        verb()
        for one in movers:
            kept = [t for t in self.model[one] if not inside(t, start, stop) or moved(t.position) >= 0]
            self.model[one] = sorted((new.get(id(t), t) for t in kept), key=lambda t: (t.position, t.born))

    @precondition(lambda self: not self.only_the_end)
    @rule(seq=SEQS, start=PLACES, count=st.integers(1, 6))
    def discard(self, seq: SeqId, start: int, count: int) -> None:
        """To remove and to move up what is behind, or nothing of the two."""
        stop = start + count
        shared = {id(t) for one in range(NUM_SEQS) if one != seq for t in self.model[one]}
        freed = sum(inside(t, start, stop) and id(t) not in shared for t in self.model[seq])
        copies = sum(t.position >= stop and id(t) in shared for t in self.model[seq])
        if copies > self._room() + freed:
            self._refused(NoSlot, lambda: self.memory.discard(seq, start, stop))
            return
        self.memory.discard(seq, start, stop)
        early = [t for t in self.model[seq] if t.position < start]
        late = [t for t in self.model[seq] if t.position >= stop]
        self.model[seq] = [*early, *(Token(t.id, t.position - count, t.born) for t in late)]

    # -- states ------------------------------------------------------------------------------------

    @rule(source=SEQS, into=SEQS, whole=st.booleans(), since=PLACES, emptied=st.booleans())
    def save_and_restore(self, source: SeqId, into: SeqId, whole: bool, since: int, emptied: bool) -> None:
        tokens = self.model[source]
        if [t.position for t in tokens] != list(range(len(tokens))):
            self._refused(EditRefused, lambda: self.memory.snapshot(source))
            return
        first = 0 if whole else since
        rows, points = self.memory.snapshot(source, first)
        assert all(run.start >= first and run.stop == len(tokens) for run in rows)
        assert all(first < point.position for point in points[:-1])
        ids = tuple(t.id for t in tokens)
        if not whole:
            # The other half comes from a snapshot of its own, as if chunks had been read from a store.
            early, kept = self.memory.snapshot(source)
            head = tuple(cut(self.memory, run, since) for run in early if run.start < min(since, run.stop))
            rows = tuple(sorted((*head, *rows), key=lambda run: (run.kind, run.start)))
            points = joined(kept, points, since)
        if emptied:
            self.remove(into, 0, None)
        land, freed = self.memory.restore, 0
        if self.model[into]:
            self._refused(EditRefused, lambda: self.memory.restore(into, ids, rows, points))
            others = {id(t) for one in range(NUM_SEQS) if one != into for t in self.model[one]}
            land, freed = self.memory.replace, sum(id(t) not in others for t in self.model[into])
        if len(ids) > self._room() + freed:
            self._refused(NoSlot, lambda: land(into, ids, rows, points))
            return
        if ids:
            self._refused(StateError, lambda: land(into, ids[1:], rows, points))
        land(into, ids, rows, points)
        self.model[into] = [Token(t.id, t.position, self._birth()) for t in tokens]
        self.marks[into] = {point.position for point in points}
        self.trails[into] = set()
        self._forgotten_marks()

    # -- what must always hold -----------------------------------------------------------------------

    @invariant()
    def cells_in_use_are_the_models(self) -> None:
        used = {id(token) for tokens in self.model for token in tokens}
        assert int(self.memory._tables.base.owners.any(0).sum()) == len(used)
        if not self.short_window:
            assert self.memory.free_cells() == self._room()

    @invariant()
    def what_is_stored_is_the_models(self) -> None:
        for seq, tokens in enumerate(self.model):
            ends = (self.memory.pos_min(SeqId(seq)), self.memory.pos_max(SeqId(seq)))
            assert ends == ((tokens[0].position, tokens[-1].position) if tokens else (None, None))
            check_stored(self.memory, SeqId(seq), self._line(tokens))

    @invariant()
    def resumable_is_what_has_its_rows_and_point_state(self) -> None:
        for seq in map(SeqId, range(NUM_SEQS)):
            end = self._end(seq)
            can = self._resumable(seq)
            assert [p for p in range(-1, end + 3) if self.memory.can_resume_at(seq, p)] == can
            for place in (end // 3, end // 2, end, end + 2):
                nearest = max(at for at in can if at <= place)
                assert self.memory.last_resumable(seq, place) == nearest

    # -- parts ---------------------------------------------------------------------------------------

    def _resumable(self, seq: SeqId) -> list[int]:
        """All positions at which a sequence can go on, rising."""
        end = self._end(seq)
        kept = {0, end, *self.marks[seq], *self.trails[seq]} if self.has_points else range(end + 1)
        places = [at for at in range(end + 1) if at in kept]
        if not self.short_window:
            return places
        fewest = min(len(held_by(self.memory, seq, kind)) for kind in (PartKind.TOKEN, PartKind.WINDOW))
        dropped = {t.position for t in self.model[seq][: len(self.model[seq]) - fewest]}
        return [at for at in places if dropped.isdisjoint(range(at - WINDOW, at))]

    def _line(self, tokens: Sequence[Token]) -> list[tuple[int, int]]:
        return [(t.id, t.position) for t in tokens]

    def _room(self) -> int:
        return NUM_CELLS - len({id(token) for tokens in self.model for token in tokens})

    def _end(self, seq: SeqId) -> int:
        return self.model[seq][-1].position + 1 if self.model[seq] else 0

    def _chosen(self, seq: SeqId | None) -> list[SeqId]:
        return [SeqId(one) for one in range(NUM_SEQS)] if seq is None else [seq]

    def _birth(self) -> int:
        self.count += 1
        return self.count

    def _next(self, rows: Sequence[SeqId]) -> tuple[list[Token], Batch]:
        """A new token for each of `rows`, and their batch."""
        ends = [self._end(SeqId(seq)) for seq in range(NUM_SEQS)]
        new = []
        for seq in rows:
            new.append(Token(self._birth(), ends[seq], self.count))
            ends[seq] += 1
        ids, positions = [token.id for token in new], [token.position for token in new]
        return new, Batch(*map(np.array, (ids, positions, rows)), np.ones(len(rows), np.bool_))

    def _refused(self, error: type[Exception], verb: Callable[[], object]) -> None:
        before = everything(self.memory)
        with pytest.raises(error):
            verb()
        assert everything(self.memory) == before


def held_by(memory: PartsMemory, seq: SeqId, kind: PartKind) -> Ints:
    """Positions of the rows of a kind; of the tokens, where no part is of that kind."""
    tables = [part.table for part in memory._parts.stored if part.spec.kind is kind]
    return (tables or [memory._tables.base])[0].positions_of(seq)


def inside(token: Token, start: int, stop: int | None) -> bool:
    return token.position >= start and (stop is None or token.position < stop)


def cut(memory: PartsMemory, run: Rows, stop: int) -> Rows:
    """The rows of `run` that belong to tokens before `stop`."""
    stop = min(stop, run.stop)
    specs = parts_of(memory.layout, run.kind)
    counts = [spec.num_rows(run.start, stop) for spec in specs]
    parts = tuple(part[:count] for part, count in zip(run.parts, counts, strict=True))
    return Rows(run.kind, run.start, stop, parts)


def joined(early: Sequence[Point], late: Sequence[Point], since: int) -> tuple[Point, ...]:
    """Points up to `since` of one snapshot, and those of one that was taken since then."""
    have = {point.position for point in late}
    return (*(point for point in early if point.position <= since and point.position not in have), *late)


#: kind, and whether its windows keep everything
MEMBERS = [(kind, False) for kind in KINDS] + [("iswa", True), ("dsa_iswa", True)]


def case_of(kind: str, full_windows: bool) -> type[TestCase]:
    machine = type(f"{kind}Machine", (Machine,), {"kind": kind, "full_windows": full_windows})
    machine.TestCase.settings = settings(max_examples=12, stateful_step_count=25)
    return machine.TestCase


for _kind, _full in MEMBERS:
    _name = "Test" + _kind.title().replace("_", "") + ("FullWindows" if _full else "")
    globals()[_name] = case_of(_kind, _full)
