"""A turn or a restore puts off the end of a session's time; what is only looked at grows old."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.runner import Engine
from serialization.blobs import BlobId
from sessions.manager import SessionManager
from sessions.names import session_ref
from sessions.policy import Policy
from sessions.stores.memory import MemoryStore
from sessions.uses import USES
from tests.faults import FaultyStore
from tests.sessions.clock import Clock
from tests.sessions.test_gc import save

DAY = 86400.0


class Watched(MemoryStore):
    """Remembers what was refreshed."""

    def refresh(self, blobs: Sequence[BlobId]) -> None:
        super().refresh(blobs)
        self.refreshed = [*self.__dict__.get("refreshed", []), *blobs]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Watched:
    return Watched(clock=clock)


@pytest.fixture
def manager(store: Watched, engine: Engine) -> SessionManager:
    return SessionManager(store, engine, Policy(lease=10, grace=100, session_ttl=10 * DAY))


def restore(manager: SessionManager, session: str) -> None:
    opened = manager.open(session)
    seq, _ = manager.resume(opened)
    manager.engine.close(seq)
    opened.close()


def test_a_restore_puts_off_the_end_and_a_look_does_not(manager: SessionManager, clock: Clock) -> None:
    restored, looked_at = save(manager, "restored"), save(manager, "looked at")
    clock.now += 9 * DAY
    restore(manager, restored)
    manager.info(looked_at)
    manager.manifest(looked_at)
    clock.now += 2 * DAY
    assert tuple(manager.plan_gc().expired) == (looked_at,)
    clock.now += 9 * DAY
    assert set(manager.plan_gc().expired) == {restored, looked_at}


def test_what_a_session_is_told_to_expire_at_moves_with_its_use(
    manager: SessionManager, clock: Clock
) -> None:
    session = save(manager, "words")
    before = manager.info(session).expires
    clock.now += 2 * DAY
    restore(manager, session)
    after = manager.info(session).expires
    assert before is not None
    assert after == before + 2 * DAY


def test_rows_and_budget_go_by_use_as_well(manager: SessionManager, clock: Clock) -> None:
    first, second = save(manager, "first " * 90), save(manager, "second " * 90)
    own = {info.id: info.own_bytes for info in manager.list()}
    clock.now += DAY
    restore(manager, first)
    manager.policy = Policy(lease=10, grace=100, rows_ttl=DAY / 2)
    assert tuple(manager.plan_gc().released) == (second,)
    manager.policy = Policy(lease=10, grace=100, budget=own[first])
    assert tuple(manager.plan_gc().released) == (second,)


def test_the_blobs_of_a_session_in_use_are_refreshed_once_in_a_while(
    manager: SessionManager, store: Watched, clock: Clock
) -> None:
    session = save(manager, "some words " * 60)
    blobs = [ref.blob for ref in manager.manifest(session).blobs()]
    assert store.refreshed == blobs
    for _ in range(3):
        restore(manager, session)
    assert store.refreshed == blobs, "it was noted a moment ago"
    clock.now += manager.policy.touch_every
    restore(manager, session)
    assert store.refreshed == blobs * 2


def test_that_a_use_cannot_be_noted_fails_nothing(engine: Engine) -> None:
    store = FaultyStore(MemoryStore())
    manager = SessionManager(store, engine, Policy(lease=10, grace=100))
    session = save(manager, "words")
    store.store.swap(USES + session, store.store.read(USES + session), None)
    manifest = manager.manifest(session)
    store.plan = "." * store.num_calls + "r" * 10
    manager.note_use(manifest)


def test_notes_of_sessions_that_are_gone_go_too(manager: SessionManager, store: Watched) -> None:
    kept, gone = save(manager, "kept"), save(manager, "gone")
    manager.delete(gone)
    manager.collect(manager.plan_gc())
    assert [ref for ref, _ in store.list_refs(USES)] == [USES + kept]


@pytest.mark.parametrize("value", [b"", b"x" * 7, b"x" * 9, b"\xff" * 8, b"\x7f\xf0" + bytes(6)])
def test_a_note_that_is_damaged_keeps_nothing_alive(
    manager: SessionManager, store: Watched, clock: Clock, value: bytes
) -> None:
    session = save(manager, "words")
    store.hint({USES + session: value})
    clock.now += 11 * DAY
    assert tuple(manager.plan_gc().expired) == (session,)
    assert store.read(session_ref(session)) is not None
