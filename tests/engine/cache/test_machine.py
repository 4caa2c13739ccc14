"""Any sequence of verbs, against a model in plain Python that knows neither cells nor tables by number.

The model keeps a list of tokens per sequence. A token is an object, and sequences that share a cell share
the object, so that the number of cells in use is known too. Tables are tiny: they fill up and wrap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.batch import Batch
from engine.cache.cells import CellTable
from engine.cache.memory import WindowSpec
from engine.cache.parts_memory import PartsMemory
from engine.errors import EditRefused, NoSlot
from engine.state import Rows, SeqId
from tests.engine.cache.harness import (
    batch_of,
    dense,
    feed_plan,
    held_rows,
    interleaved,
    keys,
    layers_of,
    queries,
    run_layers,
    spec,
    values,
    visible,
)

NUM_SEQS, NUM_CELLS, MAX_BATCH, WINDOW = 3, 48, 5, 3
#: of the window table: each sequence's window and a batch
WINDOW_CELLS = NUM_SEQS * (WINDOW + MAX_BATCH)
SEQS = st.integers(0, NUM_SEQS - 1).map(SeqId)
SEQS_OR_ALL = st.none() | SEQS
PLACES = st.integers(0, 20)
STOPS = st.none() | PLACES
COUNTS = st.lists(st.integers(0, MAX_BATCH), min_size=NUM_SEQS, max_size=NUM_SEQS).filter(
    lambda counts: 0 < sum(counts) <= MAX_BATCH
)


@dataclass(eq=False)
class Token:
    """A token in a cell: `born` sorts those that `divide` put at one position."""

    id: int
    position: int
    born: int


class Machine(RuleBasedStateMachine):
    """Verbs that every memory has."""

    short_window = False

    def build(self) -> PartsMemory:
        return PartsMemory(self.spec, CellTable(NUM_CELLS, NUM_SEQS), None)

    @initialize(max_ubatch=st.integers(1, MAX_BATCH))
    def start(self, max_ubatch: int) -> None:
        self.spec = spec(
            None,
            WindowSpec(WINDOW),
            heads=1,
            size=4,
            num_seqs=NUM_SEQS,
            max_ubatch=max_ubatch,
            max_batch=MAX_BATCH,
        )
        self.memory = self.build()
        self.model: list[list[Token]] = [[] for _ in range(NUM_SEQS)]
        self.count = 0

    # -- tokens in ---------------------------------------------------------------------------------

    @rule(batches=st.lists(COUNTS, min_size=1, max_size=4), seed=st.integers(0, 3))
    def feed(self, batches: list[list[int]], seed: int) -> None:
        for counts in batches:
            self._feed(counts, seed)

    def _feed(self, counts: list[int], seed: int) -> None:
        new = self._new_tokens(counts)
        batch = self._batch(new, seed)
        if sum(counts) > self._room():
            self._refused(NoSlot, lambda: self.memory.plan(batch))
            return
        plan = self.memory.plan(batch)
        outputs = feed_plan(self.spec, plan)
        plan.commit()
        for tokens, added in zip(self.model, new, strict=True):
            tokens.extend(added)
        for layer in layers_of(self.spec):
            out = torch.cat([ubatch[layer.layer] for ubatch in outputs])
            for seq, added in enumerate(new):
                if added:
                    self._check_attention(layer.layer, seq, added, out[batch.seqs == seq])

    @rule(counts=COUNTS, applied=st.integers(0, 3), seed=st.integers(0, 3))
    def roll_back(self, counts: list[int], applied: int, seed: int) -> None:
        if sum(counts) > self._room():
            return
        before = visible(self.memory)
        plan = self.memory.plan(self._batch(self._new_tokens(counts), seed))
        assert visible(self.memory) == before
        for index, ubatch in enumerate(plan.ubatches[:applied]):
            run_layers(self.spec, ubatch, plan.apply(index))
        plan.rollback()
        assert visible(self.memory) == before

    def _check_attention(self, layer: int, seq: int, added: Sequence[Token], out: torch.Tensor) -> None:
        layer_spec = layers_of(self.spec)[layer]
        q = queries([token.id for token in added], layer_spec, 2)
        held = self.model[seq]
        expected = dense(
            q,
            [token.position for token in added],
            [t.id for t in held],
            [t.position for t in held],
            layer_spec,
        )
        assert torch.allclose(out.double(), expected, atol=1e-4)

    # -- edits -------------------------------------------------------------------------------------

    @rule(seq=SEQS_OR_ALL, start=PLACES, stop=STOPS)
    def remove(self, seq: SeqId | None, start: int, stop: int | None) -> None:
        refused = False
        for one in self._chosen(seq):
            end = self._end(one)
            last = end if stop is None else min(stop, end)
            if start < last:
                refused |= self.short_window if last < end else not self.memory.can_resume_at(one, start)
        if refused:
            self._refused(EditRefused, lambda: self.memory.remove(seq, start, stop))
            return
        self.memory.remove(seq, start, stop)
        for one in self._chosen(seq):
            self.model[one] = [t for t in self.model[one] if not inside(t, start, stop)]

    @rule(seq=SEQS, back=st.integers(0, WINDOW + 3))
    def rewind(self, seq: SeqId, back: int) -> None:
        """Short ones, which windows allow now and then."""
        self.remove(seq, max(0, self._end(seq) - back), None)

    @precondition(lambda self: self._room() < 20)
    @rule(seq=SEQS_OR_ALL)
    def clear(self, seq: SeqId | None) -> None:
        self.memory.remove(seq, 0, None)
        for one in self._chosen(seq):
            self.model[one] = []

    @rule(source=SEQS, into=SEQS, start=PLACES | st.just(0), stop=STOPS)
    def copy(self, source: SeqId, into: SeqId, start: int, stop: int | None) -> None:
        last = self._end(source) if stop is None else min(stop, self._end(source))
        bad = self.short_window if start else not self.memory.can_resume_at(source, last)
        if source == into or bad:
            self._refused(EditRefused, lambda: self.memory.copy(source, into, start, stop))
            return
        self.memory.copy(source, into, start, stop)
        self.model[into] = [t for t in self.model[source] if inside(t, start, stop)]

    @precondition(lambda self: self._room() < 20)
    @rule(seq=SEQS)
    def keep(self, seq: SeqId) -> None:
        self.memory.keep(seq)
        self.model = [tokens if one == seq else [] for one, tokens in enumerate(self.model)]

    @rule(seq=SEQS_OR_ALL, start=PLACES, stop=STOPS, delta=st.integers(-8, 8))
    def shift(self, seq: SeqId | None, start: int, stop: int | None, delta: int) -> None:
        self._move(seq, start, stop, lambda p: p + delta, lambda: self.memory.shift(seq, start, stop, delta))

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
        if self.short_window:
            self._refused(EditRefused, verb)
            return
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

    # -- states ------------------------------------------------------------------------------------

    @rule(source=SEQS, into=SEQS, whole=st.booleans(), since=PLACES)
    def save_and_restore(self, source: SeqId, into: SeqId, whole: bool, since: int) -> None:
        tokens = self.model[source]
        if [t.position for t in tokens] != list(range(len(tokens))):
            self._refused(EditRefused, lambda: self.memory.snapshot(source))
            return
        rows, points = self.memory.snapshot(source, 0 if whole else since)
        assert all(run.start >= (0 if whole else since) for run in rows)
        assert all(run.stop == len(tokens) for run in rows)
        ids = tuple(t.id for t in tokens)
        if self.model[into]:
            self._refused(EditRefused, lambda: self.memory.restore(into, ids, rows, points))
            return
        if not whole:
            # The other half comes from a snapshot of its own, as if chunks had been read from a store.
            early, _ = self.memory.snapshot(source)
            head = tuple(cut(run, since) for run in early if run.start < min(since, run.stop))
            rows = tuple(sorted((*head, *rows), key=lambda run: (run.kind, run.start)))
        if len(ids) > self._room():
            self._refused(NoSlot, lambda: self.memory.restore(into, ids, rows, points))
            return
        self.memory.restore(into, ids, rows, points)
        self.model[into] = [Token(t.id, t.position, self._birth()) for t in tokens]

    # -- what must always hold -----------------------------------------------------------------------

    @invariant()
    def cells_in_use_are_the_models(self) -> None:
        used = {id(token) for tokens in self.model for token in tokens}
        assert int(self.memory._tables.base.owners.any(0).sum()) == len(used)
        if not self.short_window:
            assert self.memory.free_cells() == self._room()

    @invariant()
    def rows_are_the_models(self) -> None:
        for seq, tokens in enumerate(self.model):
            ids = [t.id for t in tokens]
            assert self.memory.tokens_at(SeqId(seq), 0, 10**6) == tuple(ids)
            ends = (self.memory.pos_min(SeqId(seq)), self.memory.pos_max(SeqId(seq)))
            assert ends == ((tokens[0].position, tokens[-1].position) if tokens else (None, None))
            for layer in layers_of(self.spec):
                positions, k, v = held_rows(self.memory, layer.layer, SeqId(seq))
                dropped = len(tokens) - len(positions)
                expected = tokens[dropped:]
                assert positions.tolist() == [t.position for t in expected]
                at, held = [t.position for t in expected], [t.id for t in expected]
                assert torch.allclose(k, keys(held, at, layer), atol=1e-4)
                assert torch.equal(v, values(held, layer))
                if dropped:
                    assert self.short_window
                    assert layer.window is not None
                    assert expected[0].position <= self._end(SeqId(seq)) - WINDOW

    @invariant()
    def resumable_is_what_has_its_rows(self) -> None:
        for seq, tokens in enumerate(self.model):
            end = self._end(SeqId(seq))
            held = {t.position for t in tokens}
            for layer in layers_of(self.spec):
                held &= {int(p) for p in held_rows(self.memory, layer.layer, SeqId(seq))[0]}
            for position in range(end + 2):
                needed = {t.position for t in tokens if position - WINDOW <= t.position < position}
                can = position <= end and (needed <= held or not self.short_window)
                assert self.memory.can_resume_at(SeqId(seq), position) == can

    # -- parts ---------------------------------------------------------------------------------------

    def _room(self) -> int:
        return NUM_CELLS - len({id(token) for tokens in self.model for token in tokens})

    def _end(self, seq: SeqId) -> int:
        return self.model[seq][-1].position + 1 if self.model[seq] else 0

    def _chosen(self, seq: SeqId | None) -> list[SeqId]:
        return [SeqId(one) for one in range(NUM_SEQS)] if seq is None else [seq]

    def _birth(self) -> int:
        self.count += 1
        return self.count

    def _new_tokens(self, counts: Sequence[int]) -> list[list[Token]]:
        new = []
        for seq, count in enumerate(counts):
            first = self._end(SeqId(seq))
            new.append([Token(self._birth(), first + i, self.count) for i in range(count)])
        return new

    def _batch(self, new: list[list[Token]], seed: int) -> Batch:
        parts = [(SeqId(s), added[0].position, [t.id for t in added]) for s, added in enumerate(new) if added]
        return interleaved(batch_of(*parts), seed)

    def _refused(self, error: type[Exception], verb: Callable[[], object]) -> None:
        before = visible(self.memory)
        with pytest.raises(error):
            verb()
        assert visible(self.memory) == before


class KvMachine(Machine):
    """Windows are masks over full caches."""


class WideMachine(Machine):
    """Window layers in a table of their own that is as long as the full one."""

    def build(self) -> PartsMemory:
        return PartsMemory(self.spec, CellTable(NUM_CELLS, NUM_SEQS), CellTable(NUM_CELLS, NUM_SEQS))


class IswaMachine(Machine):
    """Window layers in a table that wraps."""

    short_window = True

    def build(self) -> PartsMemory:
        return PartsMemory(
            self.spec, CellTable(NUM_CELLS, NUM_SEQS), CellTable(WINDOW_CELLS, NUM_SEQS, WINDOW)
        )


def inside(token: Token, start: int, stop: int | None) -> bool:
    return token.position >= start and (stop is None or token.position < stop)


def cut(run: Rows, stop: int) -> Rows:
    """The rows of `run` before `stop`."""
    stop = min(stop, run.stop)
    return Rows(run.kind, run.start, stop, tuple(part[: stop - run.start] for part in run.parts))


SETTINGS = settings(max_examples=40, stateful_step_count=30)
TestKv, TestWide, TestIswa = KvMachine.TestCase, WideMachine.TestCase, IswaMachine.TestCase
TestKv.settings = TestWide.settings = TestIswa.settings = SETTINGS
