"""Blobs are carried once for as long as that is known to hold, and few at a time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.errors import BlobMissing, StoreUnavailable
from serialization.blobs import BlobClass, BlobId, Bytes
from serialization.buffers import NEW, Buffers
from sessions.catalog import Catalog
from sessions.migrate import carry
from sessions.migrate.carry import Copies, InFlight
from sessions.stores.memory import MemoryStore
from tests.sessions.migrate.places import fill, put_session


class Counting(MemoryStore):
    """Counts puts, and keeps the clock that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.puts: list[BlobId] = []
        self.lock = threading.Lock()

    def put(self, cls: BlobClass, data: Bytes) -> BlobId:
        blob = super().put(cls, data)
        with self.lock:
            self.puts.append(blob)
        return blob


class Clock:
    def __init__(self, step: float = 0.0) -> None:
        self.now = 0.0
        self.step = step

    def monotonic(self) -> float:
        self.now += self.step
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(carry, "time", clock)
    return clock


def test_what_was_put_a_while_ago_is_put_again_so_that_no_gc_takes_it(clock: Clock) -> None:
    source, target = MemoryStore(), Counting()
    session, _ = put_session(source, 1)
    manifest = Catalog(source).session(session).manifest
    count = len(list(manifest.blobs()))
    copies = Copies(source, target, fresh=10.0)
    for now, puts in ((0.0, count), (9.0, count), (10.5, 2 * count), (12.0, 2 * count)):
        clock.now = now
        missing = sum(ref.nbytes for ref in manifest.blobs()) if len(target.puts) < puts else 0
        assert copies.missing_nbytes(manifest, session) == missing
        assert copies.copy(manifest, session) == (manifest, ())
        assert len(target.puts) == puts
    copies.close()


def test_what_never_is_put_in_time_is_refused(clock: Clock) -> None:
    source, target = MemoryStore(), Counting()
    session, _ = put_session(source, 1)
    clock.step = 4.0  # at every look at it
    copies = Copies(source, target, fresh=10.0)
    with pytest.raises(StoreUnavailable, match="slow"):
        copies.copy(Catalog(source).session(session).manifest, session)
    copies.close()


class Slow(MemoryStore):
    """Where others come by before a blob is read."""

    def get(self, blob: BlobId, buffers: Buffers = NEW) -> bytes:
        threading.Event().wait(0.005)
        return super().get(blob, buffers)


def test_many_threads_carry_what_they_share_once() -> None:
    source, target = Slow(), Counting()
    filled = fill(source)
    copies = Copies(source, target, fresh=1000.0)
    manifests = [Catalog(source).session(each).manifest for each in (filled.tea, filled.fork)] * 8
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda manifest: copies.copy(manifest, manifest.session), manifests))
    assert len(target.puts) == len(set(target.puts))
    assert copies.nbytes == sum(len(target.get(blob)) for blob in target.puts)
    copies.close()


def test_one_that_fails_does_not_keep_the_others_waiting() -> None:
    source, target = MemoryStore(), Counting()
    session, _ = put_session(source, 1)
    manifest = Catalog(source).session(session).manifest
    source.delete_blob(next(manifest.blobs()).blob, 0)
    copies = Copies(source, target, fresh=1000.0)
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(copies.copy, manifest, session) for _ in range(8)]:
            with pytest.raises(BlobMissing):
                done.result(timeout=20)
    copies.close()


def test_no_more_bytes_are_in_flight_than_may_be_and_a_large_one_goes_alone() -> None:
    flight, lock, now, most = InFlight(100), threading.Lock(), [0], [0]

    def fly(nbytes: int) -> None:
        with flight.room(nbytes):
            with lock:
                now[0] += nbytes
                most[0] = max(most[0], now[0])
            with lock:
                now[0] -= nbytes

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(fly, [30, 60, 50, 10, 100, 40] * 50))
        assert most[0] <= 100
        list(pool.map(fly, [250, 30] * 20))
    assert most[0] == 250
