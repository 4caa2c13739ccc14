"""What is done to the memory of a divided model is done on every rank: their tables stay the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.cache.parts_memory import PartsMemory
from engine.cache.table import build_memory
from engine.errors import EditRefused, EngineError, NoSlot, StateError
from engine.parallel.memory import ParallelMemory
from engine.runner import Engine
from engine.state import SeqId
from tests.engine.cache.harness import Lent
from tests.engine.parallel.comparing import same_bytes
from tests.engine.parallel.threads import divided
from tests.exact.members import folder
from tests.oracles import base

IDS = base.tokens(count=200)
FAMILIES = ("llama", "gemma3", "deepseek_v4", "qwen3_next", "glm5_next")


@contextmanager
def watched(family: str, monkeypatch: pytest.MonkeyPatch, size: int = 3, **settings: Any) -> Iterator[Engine]:
    """An engine of `size` ranks. When it is done with, the tables of all ranks are compared."""
    built: list[PartsMemory] = []

    def build(spec: Any) -> PartsMemory:
        built.append(build_memory(spec))
        return built[-1]

    monkeypatch.setattr("engine.parallel.follower.build_memory", build)
    monkeypatch.setattr("engine.parallel.lead.build_memory", build)
    with divided(folder(family), size, **settings) as engine:
        yield engine
    assert len(built) == size
    mine, *others = (tables(memory) for memory in built)
    for theirs in others:
        assert len(mine) == len(theirs)
        for a, b in zip(mine, theirs, strict=True):
            assert np.array_equal(a, b)


def tables(memory: PartsMemory) -> list[np.ndarray]:
    """Owners, positions and tokens of every table, and where there are checkpoints."""
    seqs = range(memory.spec.num_seqs)
    marks = [np.array(memory._checkpoints.positions(SeqId(seq))) for seq in seqs]
    found = [[table.owners, table.positions * table.owners.any(0)] for table, _ in memory._tables]
    return [array for arrays in found for array in arrays] + marks


def filled(engine: Engine, count: int = 60) -> SeqId:
    seq = engine.create()
    engine.feed(seq, IDS[:count])
    return seq


def _rewind(engine: Engine, seq: SeqId) -> None:
    engine.rewind(seq, 50)


def _fork(engine: Engine, seq: SeqId) -> None:
    engine.feed(engine.fork(seq), IDS[:5])


def _keep(engine: Engine, seq: SeqId) -> None:
    memory_of(engine).keep(seq)


def _mark(engine: Engine, seq: SeqId) -> None:
    engine.mark(seq)


def _discard(engine: Engine, seq: SeqId) -> None:
    engine.shift(seq, 4, 10)


def _shift(engine: Engine, seq: SeqId) -> None:
    memory_of(engine).shift(seq, 0, None, 7)


def _divide(engine: Engine, seq: SeqId) -> None:
    memory_of(engine).divide(seq, 0, None, 2)


def _restore(engine: Engine, seq: SeqId) -> None:
    engine.restore(engine.snapshot(seq))


def _replace(engine: Engine, seq: SeqId) -> None:
    state = engine.snapshot(seq)
    engine.rewind(seq, 0)
    engine.feed(seq, IDS[100:104])
    memory_of(engine).replace(seq, state.tokens, state.rows, state.points)


def _evict(engine: Engine, seq: SeqId) -> None:
    engine.close(filled(engine, 30))


VERBS: dict[str, tuple[str, Callable[[Engine, SeqId], None]]] = {
    "remove": ("llama", _rewind),
    "copy": ("llama", _fork),
    "keep": ("gemma3", _keep),
    "mark": ("qwen3_next", _mark),
    "discard": ("llama", _discard),
    "shift": ("llama", _shift),
    "divide": ("llama", _divide),
    "restore": ("deepseek_v4", _restore),
    "replace": ("gemma3", _replace),
    "close": ("llama", _evict),
}


def memory_of(engine: Engine) -> ParallelMemory:
    memory = engine._memory
    assert isinstance(memory, ParallelMemory)
    return memory


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_is_told(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, do = VERBS[verb]
    with watched(family, monkeypatch) as engine:
        filled(engine, 20)
        do(engine, filled(engine))


@pytest.mark.parametrize("family", FAMILIES)
def test_tables_stay_the_same_whatever_is_done(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it is refused, or nothing has room: cells are scarce."""
    rng = random.Random(family)
    with watched(family, monkeypatch, num_cells=160, n_ctx=128, max_batch=16, max_ubatch=8) as engine:
        live: list[SeqId] = []
        refused = 0
        for _ in range(120):
            try:
                _something(engine, live, rng)
            except EngineError:
                refused += 1
        assert refused < 100


def _something(engine: Engine, live: list[SeqId], rng: random.Random) -> None:
    seq = rng.choice(live) if live else None
    match rng.randrange(9):
        case 0 | 1:
            live.append(engine.create())
        case 2 | 3 | 4 if seq is not None:
            engine.feed(seq, rng.sample(IDS, rng.randint(1, 40)))
        case 5 if seq is not None:
            live.append(engine.fork(seq))
        case 6 if seq is not None:
            engine.rewind(seq, rng.randint(0, engine.length(seq)))
        case 7 if seq is not None:
            engine.shift(seq, 2, rng.randint(0, 5))
        case 8 if seq is not None:
            live.remove(seq)
            engine.close(seq)


def test_a_verb_that_is_refused_is_refused_before_anyone_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with watched("qwen3_next", monkeypatch) as engine:
        seq = filled(engine)
        memory = memory_of(engine)
        with pytest.raises(EditRefused):
            memory.remove(seq, 3, None)
        with pytest.raises(EditRefused):
            memory.discard(seq, 3, 9)
        engine.feed(seq, IDS[:8])


def test_a_state_that_has_no_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with watched("llama", monkeypatch, num_cells=64) as engine:
        seq = filled(engine, 40)
        state = engine.snapshot(seq)
        with pytest.raises(NoSlot):
            engine.restore(state)
        assert engine.snapshot(seq).tokens == state.tokens


def test_misshapen_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with watched("llama", monkeypatch) as engine:
        state = engine.snapshot(filled(engine, 40))
        short = type(state.rows[0])(state.rows[0].kind, 0, 39, state.rows[0].parts)
        target = engine.create()
        with pytest.raises(StateError):
            memory_of(engine).restore(target, state.tokens, (short,), ())
        engine.feed(target, IDS[:4])


@pytest.mark.parametrize("family", ["llama", "deepseek_v4"])
def test_rows_that_are_lent_reach_every_rank(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(family, monkeypatch) as engine:
        state = engine.snapshot(filled(engine))
        again = engine.restore(replace(state, rows=()), Lent.all(state.rows, ()))
        assert same_bytes(engine.snapshot(again), state)
