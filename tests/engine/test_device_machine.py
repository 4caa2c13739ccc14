"""Any sequence of verbs on sequences and their copies, against a model that knows which handles are good.

The model has, of every handle, whose it was, what the sequence was then, and what became of it; of every live
sequence what it must be. Two engines that are alike in everything know nothing of each other's handles.
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass
from unittest import TestCase

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.device_state import DeviceState
from engine.errors import EngineError, HandleRefused, NoSlot
from engine.runner import Engine
from engine.state import NextLogits, PartKind, SeqId
from tests.exact.members import MEMBERS, open_member

NUM_SEQS, NUM_CELLS, N_CTX = 3, 150, 100
#: a pick of the other engine
OTHER = 5
#: how many tokens, and which the first is
COUNTS, FIRSTS = st.integers(5, 50), st.integers(0, 5)
#: which of several: sequences, engines; and handles, the last ones first
PICKS, LATEST = st.integers(0, 1000), st.integers(0, 6)


@dataclass(eq=False)
class Life:
    """Of a sequence, from its beginning until it is closed; it must look as `digest` says."""

    digest: str
    over: bool = False


@dataclass
class Copy:
    """A handle and what it stands for."""

    handle: DeviceState
    engine: int
    life: Life
    digest: str
    freed: bool = False


def digest(engine: Engine, seq: SeqId) -> str:
    """Of all that a sequence is: of window rows, those that it needs."""
    state = engine.snapshot(seq)
    found = hashlib.blake2b()
    logits = engine.logits(seq)
    edge = state.edge.logits.tolist() if isinstance(state.edge, NextLogits) else state.edge
    told = (state.tokens, state.spans, state.sampler, state.canary, edge)
    found.update(repr((told, None if logits is None else logits.tolist())).encode())
    for run in state.rows:
        specs = [spec for spec in engine.layout if spec.kind is run.kind]
        for spec, part in zip(specs, run.parts, strict=True):
            needed = part if run.kind is not PartKind.WINDOW else part[-(spec.window or 0) :]
            found.update(needed.numpy().tobytes())
    for part in state.points[-1].parts if state.points else ():
        found.update(part.numpy().tobytes())
    return found.hexdigest()


class Machine(RuleBasedStateMachine):
    family = ""

    @initialize(room=st.sampled_from([60, 200, 10_000]))
    def start(self, room: int) -> None:
        """`room` is for so many tokens in copies."""
        sizes = {"num_seqs": NUM_SEQS, "num_cells": NUM_CELLS, "n_ctx": N_CTX}
        engine = open_member(self.family, "q8_0", **sizes)
        seq = engine.create()
        engine.feed(seq, [1] * 50)
        self.budget = engine.device_snapshot(seq).nbytes * room // 50
        settings = {**sizes, "device_state_bytes": self.budget}
        self.engines = [open_member(self.family, "q8_0", **settings) for _ in range(2)]
        self.lives: list[dict[SeqId, Life]] = [{}, {}]
        self.copies: list[Copy] = []
        for which in (0, 1, OTHER):
            self.create(which)
            self.feed(which, 40, 0)
            self.snapshot(which)

    # -- sequences -----------------------------------------------------------------------------------

    @rule(which=PICKS)
    def create(self, which: int) -> None:
        engine, lives = self._engine(which)
        if len(lives) < NUM_SEQS:
            self._begun(engine, lives, engine.create())

    @precondition(lambda self: any(self.lives))
    @rule(which=PICKS, count=COUNTS, first=FIRSTS)
    def feed(self, which: int, count: int, first: int) -> None:
        engine, lives, seq = self._live(which)
        with contextlib.suppress(EngineError):  # there is no room, and it may have read a part
            engine.feed(seq, [(first + 7 * at) % 250 for at in range(count)])
        lives[seq].digest = digest(engine, seq)

    @precondition(lambda self: any(self.lives))
    @rule(which=PICKS, back=st.integers(0, 100))
    def rewind(self, which: int, back: int) -> None:
        engine, lives, seq = self._live(which)
        engine.rewind(seq, engine.last_resumable(seq, max(0, engine.length(seq) - back)))
        lives[seq].digest = digest(engine, seq)

    @precondition(lambda self: any(self.lives))
    @rule(which=PICKS)
    def fork(self, which: int) -> None:
        engine, lives, seq = self._live(which)
        if len(lives) < NUM_SEQS:
            self._begun(engine, lives, engine.fork(seq))

    @precondition(lambda self: len(self.lives[0]) > 1)
    @rule(which=PICKS)
    def close(self, which: int) -> None:
        engine, lives, seq = self._live(which)
        engine.close(seq)
        lives.pop(seq).over = True

    # -- copies --------------------------------------------------------------------------------------

    @precondition(lambda self: any(self.lives))
    @rule(which=PICKS)
    def snapshot(self, which: int) -> None:
        engine, lives, seq = self._live(which)
        life = lives[seq]
        others = [copy for copy in self.copies if self._good(copy, engine) and copy.life is not life]
        taken = sum(copy.handle.nbytes for copy in others)
        try:
            handle = engine.device_snapshot(seq)
        except NoSlot:
            rows, points = engine._memory.snapshot(seq)
            nbytes = sum(run.nbytes for run in rows)
            nbytes += sum(part.numel() for point in points for part in point.parts)
            assert taken + nbytes > self.budget
            return
        assert (handle.seq, handle.length) == (seq, engine.length(seq))
        assert taken + handle.nbytes <= self.budget
        self.copies.append(Copy(handle, self.engines.index(engine), life, life.digest))

    @precondition(lambda self: self.copies)
    @rule(number=LATEST, which=PICKS)
    def restore(self, number: int, which: int) -> None:
        copy = self.copies[-1 - number % len(self.copies)]
        engine, lives = self._engine(which)
        targets: list[SeqId | None] = [None, *lives]
        into = targets[which // 6 % len(targets)]
        if self._refused(copy, engine, lambda: engine.device_restore(copy.handle, into)):
            return
        try:
            seq = engine.device_restore(copy.handle, into)
        except NoSlot:
            others = sum(engine.length(seq) for seq in lives if seq != into)
            crowded = others + copy.handle.length > NUM_CELLS
            assert crowded or (into is None and len(lives) == NUM_SEQS)
            return
        if into is None:
            self._begun(engine, lives, seq)
        assert seq == into or into is None
        assert digest(engine, seq) == copy.digest
        lives[seq].digest = copy.digest

    @precondition(lambda self: self.copies)
    @rule(number=LATEST, which=PICKS)
    def free(self, number: int, which: int) -> None:
        copy = self.copies[-1 - number % len(self.copies)]
        engine, _ = self._engine(which)
        if not self._refused(copy, engine, lambda: engine.device_free(copy.handle)):
            engine.device_free(copy.handle)
            copy.freed = True

    # -- what must always hold -----------------------------------------------------------------------

    @invariant()
    def sequences_are_what_they_must_be(self) -> None:
        for engine, lives in zip(self.engines, self.lives, strict=True):
            for seq, life in lives.items():
                assert digest(engine, seq) == life.digest

    @invariant()
    def what_copies_take_is_what_the_good_ones_take(self) -> None:
        for engine in self.engines:
            good = [copy.handle.nbytes for copy in self.copies if self._good(copy, engine)]
            assert engine._device_states.nbytes() == sum(good) <= self.budget

    # -- parts ---------------------------------------------------------------------------------------

    def _refused(self, copy: Copy, engine: Engine, verb: object) -> bool:
        """Whether the handle is not good there; then it is seen to be refused for the right reason."""
        reason = self._reason(copy, engine)
        if reason is None:
            return False
        with pytest.raises(HandleRefused) as refused:
            verb()  # type: ignore[operator]
        assert refused.value.details["reason"] == reason
        return True

    def _reason(self, copy: Copy, engine: Engine) -> str | None:
        if self.engines[copy.engine] is not engine:
            return "foreign"
        if copy.life.over:
            return "removed"
        later = self.copies[self.copies.index(copy) + 1 :]
        if any(other.life is copy.life for other in later):
            return "stale"
        return "freed" if copy.freed else None

    def _good(self, copy: Copy, engine: Engine) -> bool:
        return self._reason(copy, engine) is None

    def _engine(self, which: int) -> tuple[Engine, dict[SeqId, Life]]:
        """Mostly the first one."""
        number = int(which % 6 == OTHER)
        return self.engines[number], self.lives[number]

    def _live(self, which: int) -> tuple[Engine, dict[SeqId, Life], SeqId]:
        engine, lives = self._engine(which)
        if not lives:
            number = int(not self.lives[0])
            engine, lives = self.engines[number], self.lives[number]
        return engine, lives, sorted(lives)[which // 6 % len(lives)]

    def _begun(self, engine: Engine, lives: dict[SeqId, Life], seq: SeqId) -> None:
        lives[seq] = Life(digest(engine, seq))


def case_of(family: str) -> type[TestCase]:
    machine = type(f"{family}Machine", (Machine,), {"family": family})
    machine.TestCase.settings = settings(max_examples=25, stateful_step_count=40)
    return machine.TestCase


for _family in ("llama", "gemma3", "falcon_h1"):
    assert _family in MEMBERS
    globals()["Test" + _family.title().replace("_", "")] = case_of(_family)
