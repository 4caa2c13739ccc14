"""Drafts that are rolled back leave what a run has that never had the rejected tokens: for every member of
the family, between saves, restores, forks and checkpoints."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from unittest import TestCase
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.cache import iswa
from engine.cache.table import KINDS
from engine.errors import EditRefused
from engine.runner import Engine
from engine.state import PartKind, SeqId, SequenceState
from tests.exact.members import MEMBERS, OTHERS, open_member
from tests.exact.plain import Line, check_points, check_rows, compute
from tests.exact.running import forget
from tests.oracles import base

ROLLBACK = 4
#: passes that hold a whole draft, and such that do not
PASSES = (8, 3)
MAX_BATCH = 12
MOST_LIVE = 3
CONTEXT = 200

TEXT = base.tokens(9, 4096)

#: how many tokens are guessed behind one that is not, and how many of them turn out right
DRAFTS = st.integers(0, ROLLBACK).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k)))
POINTED = [name for name, kind in KINDS.items() if kind.point_state]
#: other architectures with point state than those of the family's members
RECURRENT = [family for family, member in OTHERS.items() if member.kind in POINTED]


@functools.cache
def engines(family: str, dtype: str, max_ubatch: int) -> tuple[Engine, Engine, Engine]:
    """Two to work with, and one for the reference. Windows have just the cells that they need, so that a
    batch takes those of rows that its sequences have left behind, whenever it can."""
    sizes = {"max_batch": MAX_BATCH, "max_ubatch": max_ubatch, "n_ctx": CONTEXT, "num_seqs": MOST_LIVE}
    never = 10**6  # checkpoints are taken where a test says so
    with patch.object(iswa, "window_cells", lambda spec, window: MOST_LIVE * window + MAX_BATCH):
        first, second, third = (
            open_member(family, dtype, rollback=ROLLBACK, checkpoint_every=never, **sizes) for _ in range(3)
        )
    return first, second, third


@dataclass(eq=False)
class Subject:
    """A sequence, what it must be made of, and where its point state was kept."""

    engine: Engine
    seq: SeqId
    line: Line
    trail: set[int] = field(default_factory=set)
    marks: set[int] = field(default_factory=set)

    def check(self) -> SequenceState:
        state = self.engine.snapshot(self.seq)
        check_rows(state, self.line)
        check_points(state, self.line, self.marks)
        return state

    def resumable(self) -> list[int]:
        """All lengths that have their point state, and window rows enough."""
        length, window = len(self.line), self.line.window
        kept = [0, *self.trail, *self.marks, length] if self.line.has_points else range(length + 1)
        runs = self.engine.snapshot(self.seq).rows_of(PartKind.WINDOW)
        held = runs[0].start if runs else 0
        return sorted(at for at in {*kept} if at == 0 or held <= max(0, at - (window or 0)))

    def went_on(self, count: int) -> None:
        length = len(self.line)
        self.trail = set(range(max(length - ROLLBACK, length - count + 1), length))

    def was_cut(self, length: int) -> None:
        self.line = self.line.at(length)
        self.trail = {at for at in self.trail if at < length}
        self.marks = {at for at in self.marks if 0 < at <= length}


class Rollback(RuleBasedStateMachine):
    family, dtype = "", "bf16"

    @initialize(
        max_ubatch=st.sampled_from(PASSES), prompt=st.integers(1, MAX_BATCH), batches=st.integers(1, 12)
    )
    def start(self, max_ubatch: int, prompt: int, batches: int) -> None:
        self.main, self.other, self.reference = engines(self.family, self.dtype, max_ubatch)
        self.text = itertools.cycle(TEXT)
        self.subjects: list[Subject] = []
        self._add(self.main, self.main.create(), Line(self.main.layout))
        self.feed(0, prompt)
        for _ in range(batches - 1):
            self.feed(0, MAX_BATCH)

    def teardown(self) -> None:
        for subject in getattr(self, "subjects", []):
            forget(subject.engine, subject.seq)

    # -- tokens in ---------------------------------------------------------------------------------

    @rule(which=st.integers(0), count=st.integers(1, MAX_BATCH))
    def feed(self, which: int, count: int) -> None:
        self._advance([(self._subject(which), count)])

    @rule(which=st.integers(0), rounds=st.lists(DRAFTS, min_size=1, max_size=4))
    def draft(self, which: int, rounds: list[tuple[int, int]]) -> None:
        one = self._subject(which)
        for drafted, accepted in rounds:
            self._draft([(one, drafted, accepted)])
            one.check()

    @rule(first=DRAFTS, second=DRAFTS)
    def draft_side_by_side(self, first: tuple[int, int], second: tuple[int, int]) -> None:
        together = [one for one in self.subjects if one.engine is self.main]
        self._draft([(one, *draft) for one, draft in zip(together, (first, second), strict=False)])

    def _draft(self, drafts: Sequence[tuple[Subject, int, int]]) -> None:
        """A token and guesses behind it, of which some are accepted, and the others go at once."""
        if not self._advance([(one, 1 + drafted) for one, drafted, _ in drafts]):
            return
        for one, drafted, accepted in drafts:
            rejected = drafted - accepted
            assert one.engine.can_resume_at(one.seq, len(one.line) - rejected)
            self._rewind(one, len(one.line) - rejected)

    def _advance(self, work: Sequence[tuple[Subject, int]]) -> bool:
        """One batch of new tokens; none where a context would be full."""
        if not work or any(len(one.line) + count > CONTEXT for one, count in work):
            return False
        tokens = [list(itertools.islice(self.text, count)) for _, count in work]
        work[0][0].engine.advance({one.seq: ids for (one, _), ids in zip(work, tokens, strict=True)})
        compute(self.reference, [(one.line, ids) for (one, _), ids in zip(work, tokens, strict=True)])
        for one, count in work:
            one.went_on(count)
        return True

    # -- edits -------------------------------------------------------------------------------------

    @rule(which=st.integers(0), back=st.integers(0, 2 * ROLLBACK))
    def rewind(self, which: int, back: int) -> None:
        one = self._subject(which)
        self._rewind(one, max(0, len(one.line) - back))

    @rule(which=st.integers(0), length=st.integers(0, CONTEXT))
    def rewind_far(self, which: int, length: int) -> None:
        one = self._subject(which)
        nearest = one.engine.last_resumable(one.seq, length)
        assert nearest == max(at for at in one.resumable() if at <= length)
        self._rewind(one, min(length, len(one.line)))
        self._rewind(one, min(nearest, len(one.line)))

    def _rewind(self, one: Subject, length: int) -> None:
        """It is done where it can be, and otherwise refused and nothing has changed."""
        can = one.resumable()
        assert one.engine.can_resume_at(one.seq, length) == (length in can)
        if length in can:
            one.engine.rewind(one.seq, length)
            one.was_cut(length)
        else:
            with pytest.raises(EditRefused) as refusal:
                one.engine.rewind(one.seq, length)
            nearest = max(at for at in can if at < length)
            assert str(refusal.value).endswith(
                f"the nearest before is {nearest}"
                if one.line.has_points and length not in one.trail | one.marks
                else "its window rows are gone"
            )

    @precondition(lambda self: self.subjects[0].line.has_points)
    @rule(which=st.integers(0))
    def mark(self, which: int) -> None:
        one = self._subject(which)
        one.engine.mark(one.seq)
        if one.line.tokens:
            one.marks.add(len(one.line))

    @rule(which=st.integers(0))
    def fork(self, which: int) -> None:
        one = self._subject(which)
        if self._has_room(one.engine):
            fork = self._add(one.engine, one.engine.fork(one.seq), one.line.at(len(one.line)))
            fork.trail, fork.marks = set(one.trail), set(one.marks)

    @rule(which=st.integers(0))
    def save_and_restore(self, which: int) -> None:
        """Into the other engine: what is kept of the last batch is no part of a state."""
        one = self._subject(which)
        target = self.other if one.engine is self.main else self.main
        if self._has_room(target):
            restored = target.restore(one.engine.snapshot(one.seq))
            again = self._add(target, restored, one.line.at(len(one.line)))
            again.marks = {*one.marks, len(one.line)} if one.line.has_points and one.line.tokens else set()

    @precondition(lambda self: len(self.subjects) > 1)
    @rule(which=st.integers(0))
    def end(self, which: int) -> None:
        one = self._subject(which)
        self.subjects.remove(one)
        forget(one.engine, one.seq)

    # -- what must always hold ---------------------------------------------------------------------

    @invariant()
    def every_sequence_is_what_its_tokens_have_left(self) -> None:
        for one in self.subjects:
            one.check()
            can = [at for at in range(len(one.line) + 2) if one.engine.can_resume_at(one.seq, at)]
            assert can == one.resumable()

    # -- parts -------------------------------------------------------------------------------------

    def _subject(self, which: int) -> Subject:
        return self.subjects[which % len(self.subjects)]

    def _add(self, engine: Engine, seq: SeqId, line: Line) -> Subject:
        self.subjects.append(Subject(engine, seq, line))
        return self.subjects[-1]

    def _has_room(self, engine: Engine) -> bool:
        return sum(one.engine is engine for one in self.subjects) < MOST_LIVE


def case_of(family: str, dtype: str, examples: int, steps: int) -> type[TestCase]:
    machine = type(f"{family}Rollback", (Rollback,), {"family": family, "dtype": dtype})
    machine.TestCase.settings = settings(max_examples=examples, stateful_step_count=steps)
    return machine.TestCase


for _family in MEMBERS:
    globals()[f"Test_{_family}"] = case_of(_family, "bf16", 5, 20)
for _family in RECURRENT:
    globals()[f"Test_{_family}"] = case_of(_family, "bf16", 2, 10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"),
    [(name, dtype) for name in (*MEMBERS, *RECURRENT) for dtype in {**MEMBERS, **OTHERS}[name].dtypes],
)
def test_longer_runs(family: str, dtype: str) -> None:
    """In all dtypes, and with more draws."""
    case_of(family, dtype, 20, 40)("runTest").debug()


# -- by other ways to the same state ---------------------------------------------------------------


def points_of(engine: Engine, seq: SeqId) -> list[torch.Tensor]:
    *_, last = engine.snapshot(seq).points
    return [part.view(torch.float32) for part in last.parts]


@pytest.mark.parametrize("family", [family for family, member in MEMBERS.items() if member.kind in POINTED])
def test_each_state_is_about_that_of_a_run_that_stops_there(family: str) -> None:
    """Batches of other lengths move the last bits, and no more; a state of another place is far off."""
    engine, other, _ = engines(family, "f32", 8)
    seq = engine.create()
    engine.advance({seq: TEXT[:MAX_BATCH]})
    engine.advance({seq: TEXT[20 : 21 + ROLLBACK]})
    for length in range(MAX_BATCH + ROLLBACK, MAX_BATCH, -1):
        engine.rewind(seq, length)
        apart = {}
        for stop in (length, length - 1):
            there = other.create()
            other.advance({there: TEXT[:MAX_BATCH]})
            if stop > MAX_BATCH:
                other.advance({there: TEXT[20 : 20 + stop - MAX_BATCH]})
            pairs = zip(points_of(engine, seq), points_of(other, there), strict=True)
            apart[stop] = max(float((a - b).norm() / b.norm()) for a, b in pairs)
            forget(other, there)
        assert apart[length] < 1e-4 < 1e-2 < apart[length - 1]
    forget(engine, seq)


@functools.cache
def deterministic(family: str) -> tuple[Engine, Engine]:
    """One that drafts, and one that never does."""
    sizes = {"max_batch": MAX_BATCH, "n_ctx": CONTEXT, "num_seqs": MOST_LIVE, "deterministic": True}
    return open_member(family, "bf16", rollback=ROLLBACK, **sizes), open_member(family, "bf16", **sizes)


@settings(max_examples=3)
@given(
    first=st.integers(1, MAX_BATCH),
    rounds=st.lists(st.tuples(DRAFTS, st.sampled_from(["", "fork", "restore"])), min_size=2, max_size=5),
    data=st.data(),
)
@pytest.mark.parametrize(
    "family", [*MEMBERS, *(pytest.param(family, marks=pytest.mark.slow) for family in RECURRENT)]
)
def test_in_the_deterministic_mode_it_is_the_run_that_never_drafted(
    family: str, first: int, rounds: list[tuple[tuple[int, int], str]], data: st.DataObject
) -> None:
    """Whose tokens come in batches of other lengths, too."""
    drafting, plain = deterministic(family)
    text = iter(TEXT)
    mine, theirs = drafting.create(), plain.create()
    start = list(itertools.islice(text, first))
    drafting.advance({mine: start})
    plain.advance({theirs: start})
    for (drafted, accepted), between in rounds:
        length = drafting.length(mine) + 1 + accepted
        drafting.advance({mine: list(itertools.islice(text, 1 + drafted))})
        drafting.rewind(mine, length)
        left = drafting.tokens(mine)
        while plain.length(theirs) < length:
            at = plain.length(theirs)
            plain.advance({theirs: left[at : data.draw(st.integers(at + 1, length))]})
        assert equal(drafting.snapshot(mine), plain.snapshot(theirs))
        if between:
            before = mine
            mine = drafting.fork(mine) if between == "fork" else drafting.restore(drafting.snapshot(mine))
            forget(drafting, before)
    forget(drafting, mine)
    forget(plain, theirs)


def equal(mine: SequenceState, theirs: SequenceState) -> bool:
    """Bit for bit, in tokens, rows and the point state at the end."""
    runs = zip(mine.rows, theirs.rows, strict=True)
    pairs = [pair for a, b in runs for pair in zip(a.parts, b.parts, strict=True)]
    if mine.points:
        pairs += zip(mine.points[-1].parts, theirs.points[-1].parts, strict=True)
    return mine.tokens == theirs.tokens and all(torch.equal(*pair) for pair in pairs)
