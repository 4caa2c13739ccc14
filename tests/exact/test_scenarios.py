"""Exact resume after forks and rewinds, beside other sequences, in shuffled cells, after other ubatches, and
from Redis: for every member of the family."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from engine.batch import Ints
from engine.cache.cells import CellTable
from engine.runner import Engine
from engine.state import SeqId
from serialization.manifest import Manifest
from sessions.manager import SessionManager
from sessions.stores.memory import MemoryStore
from sessions.stores.open import open_store
from tests.exact.members import MEMBERS, open_member
from tests.exact.running import STEPS, first_difference, go_on, restored
from tests.oracles import base
from tests.redis_server import RedisServer

PAST = base.tokens(5, 70)
NEXT = base.tokens(6, STEPS)

members = pytest.mark.parametrize("family", list(MEMBERS))


def manager_of(family: str, **settings: object) -> SessionManager:
    return SessionManager(MemoryStore(), open_member(family, "bf16", **settings))


def saved(manager: SessionManager, seq: SeqId) -> Manifest:
    session = manager.create()
    manager.save(session, seq, ())
    session.close()
    assert session.manifest is not None
    return session.manifest


def goes_on_as(live: Engine, seq: SeqId, other: Engine, manager: SessionManager, manifest: Manifest) -> bool:
    """Whether the restored sequence says what the live one says for the next steps."""
    again = other.restore(restored(other, manager, manifest))
    assert other.tokens(again) == live.tokens(seq)
    return first_difference(go_on(other, again, NEXT), go_on(live, seq, NEXT)) is None


@members
def test_a_fork_and_its_source_each_go_on_from_what_was_saved_of_them(family: str) -> None:
    manager = manager_of(family)
    engine = manager.engine
    seq = engine.create()
    engine.feed(seq, PAST[:50])
    fork = engine.fork(seq)
    engine.feed(fork, PAST[55:61])
    engine.feed(seq, PAST[50:])
    for each in (fork, seq):
        manifest = saved(manager, each)
        assert goes_on_as(engine, each, open_member(family, "bf16"), manager, manifest)


@members
def test_after_a_rewind_what_follows_is_what_was_rewound_to(family: str) -> None:
    manager = manager_of(family)
    engine = manager.engine
    seq = engine.create()
    engine.feed(seq, PAST[:33])
    engine.mark(seq)
    engine.feed(seq, PAST[33:37])
    straight = engine.fork(seq)
    engine.rewind(seq, 33)
    engine.feed(seq, PAST[60:70])
    manifest = saved(manager, seq)
    assert goes_on_as(engine, seq, open_member(family, "bf16"), manager, manifest)
    # and the other branch knows nothing of it
    other = engine.create()
    engine.feed(other, PAST[:33])
    engine.feed(other, PAST[33:37])
    assert first_difference(go_on(engine, other, NEXT), go_on(engine, straight, NEXT)) is None


@members
def test_a_checkpoint_that_was_saved_can_be_gone_back_to_in_another_process(family: str) -> None:
    manager = manager_of(family)
    engine = manager.engine
    seq = engine.create()
    engine.feed(seq, PAST[:33])
    session = manager.create()
    manager.save(session, seq, ())
    live = engine.fork(seq)
    engine.feed(seq, PAST[33:])
    manager.save(session, seq, ())
    session.close()
    assert session.manifest is not None
    other = SessionManager(manager.store, open_member(family, "bf16"))
    again, length = other.seed(session, PAST[:33], engine.sampler(seq))
    assert length == 33
    assert first_difference(go_on(other.engine, again, NEXT), go_on(engine, live, NEXT)) is None


@members
def test_two_other_sequences_beside_it_change_nothing(family: str) -> None:
    manager = manager_of(family)
    engine = manager.engine
    seq, one, two = engine.create(), engine.create(), engine.create()
    for at in range(0, 60, 5):
        engine.feed(one, PAST[at + 3 : at + 7])
        engine.feed(seq, PAST[at : at + 5])
        engine.feed(two, PAST[at + 1 : at + 4])
    manifest = saved(manager, seq)
    other = open_member(family, "bf16")
    for count in (9, 23):
        beside = other.create()
        other.feed(beside, PAST[count:])
    assert goes_on_as(engine, seq, other, manager, manifest)


@members
def test_sequences_decoded_together_go_on_together(family: str) -> None:
    manager = manager_of(family)
    engine = manager.engine
    live = [engine.create() for _ in range(3)]
    for count, seq in zip((31, 44, 57), live, strict=True):
        engine.feed(seq, PAST[:count])
    other = open_member(family, "bf16")
    again = [other.restore(restored(other, manager, saved(manager, seq))) for seq in live]
    for token in NEXT:
        engine.advance({seq: (token + i,) for i, seq in enumerate(live)})
        other.advance({seq: (token + i,) for i, seq in enumerate(again)})
        for mine, theirs in zip(again, live, strict=True):
            assert torch.equal(logits(other, mine), logits(engine, theirs))


@members
def test_the_cells_that_rows_are_in_change_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = manager_of(family)
    engine = manager.engine
    seq = engine.create()
    engine.feed(seq, PAST)
    manifest = saved(manager, seq)
    live = go_on(engine, seq, NEXT)
    shuffle_cells(monkeypatch)
    other = open_member(family, "bf16")
    again = other.restore(restored(other, manager, manifest))
    assert first_difference(go_on(other, again, NEXT), live) is None


def shuffle_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every table gives cells in an order of its own from now on."""
    random = np.random.default_rng(0)
    find_slot = CellTable.find_slot

    def shuffled(table: CellTable, requests: Sequence[tuple[SeqId, int]]) -> list[Ints]:
        counts = np.cumsum([len(cells) for cells in find_slot(table, requests)])
        pool = random.permutation(np.flatnonzero(table.takeable()))
        return np.split(pool[: counts[-1]], counts[:-1])

    monkeypatch.setattr(CellTable, "find_slot", shuffled)


@members
def test_how_the_past_was_cut_into_ubatches_is_past(family: str) -> None:
    manager = manager_of(family, max_ubatch=7, max_batch=20)
    engine = manager.engine
    seq = engine.create()
    engine.feed(seq, PAST)
    manifest = saved(manager, seq)
    assert goes_on_as(engine, seq, open_member(family, "bf16", max_ubatch=64), manager, manifest)


@members
def test_a_state_comes_back_from_redis_as_it_went(family: str, redis_server: RedisServer) -> None:
    manager = SessionManager(open_store(redis_server.url), open_member(family, "bf16"))
    engine = manager.engine
    seq = engine.create()
    engine.feed(seq, PAST)
    manifest = saved(manager, seq)
    assert goes_on_as(engine, seq, open_member(family, "bf16"), manager, manifest)


def logits(engine: Engine, seq: SeqId) -> torch.Tensor:
    found = engine.logits(seq)
    assert found is not None
    return found
