"""What takes longer than gc waits is carried again, or refused: never committed without its blobs."""

from __future__ import annotations

import pytest

from engine.errors import BlobMissing
from serialization.blobs import BlobClass, BlobId, blob_class
from serialization.buffers import NEW, Buffers
from serialization.reencode.reencoding import Reencoding
from sessions.catalog import Catalog
from sessions.manager import SessionManager
from sessions.migrate import carry, singles
from sessions.migrate.reencoded import Reencoded
from sessions.migrate.singles import Single, into_store
from sessions.migrate.survey import Clash
from sessions.stores.memory import MemoryStore
from tests.sessions.migrate.places import POLICY, archives, check_clean, migration, put_session

RAW = Reencoded(Reencoding(codec="raw"))


class Clock:
    """Goes on only where it is told to."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


class SlowStore(MemoryStore):
    """From `begin` on, each blob of the class takes two seconds, in which `collected` has a gc."""

    def __init__(self, clock: Clock, slow: BlobClass, collected: SessionManager) -> None:
        super().__init__()
        self._passing = clock
        self._slow = slow
        self._collected = collected
        self._begun = False

    def begin(self) -> None:
        self._begun = True

    def get(self, blob: BlobId, buffers: Buffers = NEW) -> bytes:
        if self._begun and blob_class(blob) is self._slow:
            self._passing.now += 2.0
            self._collected.collect(self._collected.plan_gc())
        return super().get(blob, buffers)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(carry, "time", clock)
    monkeypatch.setattr(singles, "time", clock)
    return clock


@pytest.fixture
def manager(clock: Clock) -> SessionManager:
    return SessionManager(MemoryStore(clock=clock.time), None, POLICY)


def test_sessions_that_wait_for_slow_ones_are_not_committed_without_what_gc_took(
    clock: Clock, manager: SessionManager
) -> None:
    source = SlowStore(clock, BlobClass.MANIFEST, manager)
    for seed in range(8):
        put_session(source, seed)
    with migration(source, manager.store, jobs=1) as moving:
        source.begin()
        moved = moving.run()
    assert (moved.num_sessions, moved.problems) == (8, [])
    check_clean(manager.store)
    assert archives(manager.store) == archives(source)


def test_a_conversion_that_was_so_slow_that_gc_took_its_first_blobs_is_told_of(
    clock: Clock, manager: SessionManager
) -> None:
    source = SlowStore(clock, BlobClass.ROWS, manager)
    put_session(source, 1, length=3000)
    with migration(source, manager.store, jobs=1, conversion=RAW) as moving:
        source.begin()
        moved = moving.run()
    assert (moved.num_sessions, len(moved.problems)) == (0, 1)
    assert list(Catalog(manager.store).entries()) == []


def test_a_single_one_is_refused(clock: Clock, manager: SessionManager) -> None:
    source = SlowStore(clock, BlobClass.ROWS, manager)
    session, _ = put_session(source, 1, length=3000)
    single = Single(Catalog(source).session(session).manifest, source)
    source.begin()
    with pytest.raises(BlobMissing):
        into_store(single, manager, "tea", Clash.REFUSE, RAW)
    assert list(Catalog(manager.store).entries()) == []
