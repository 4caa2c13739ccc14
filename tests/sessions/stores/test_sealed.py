"""A sealed store keeps every law of stores, over each of them, and nobody reads it without its keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import LimitExceeded
from serialization.blobs import BlobClass, Store
from sessions.keyring.keyset import Scope
from tests.redis_server import RedisServer
from tests.sessions.stores.benches import Bench, DiskBench, MemoryBench, RedisBench, SealedBench
from tests.sessions.stores.contract import StoreContract
from tests.sessions.stores.test_tiered import TieredBench

ROWS = BlobClass.ROWS


class SealedContract(StoreContract):
    """Where a law speaks of the stored bytes themselves, here is what is true of sealed ones."""

    def test_stored_bytes_are_exactly_those_put(self, store: Store, bench: Bench) -> None:
        stored = bench.raw_blob(store.put(ROWS, b"nobody sees them"))
        assert stored.startswith(b"tenutoS")
        assert b"nobody" not in stored
        assert len(stored) == 16 + bench.room

    def test_size_limit_holds_in_both_directions(self, store: Store, bench: Bench) -> None:
        assert len(store.get(store.put(ROWS, bytes(100_000)))) == 100_000
        with pytest.raises(LimitExceeded):
            store.put(ROWS, bytes(100_001))
        blob = store.put(ROWS, b"grows")
        bench.write_blob(blob, bytes(100_001 + bench.room))
        with pytest.raises(LimitExceeded):
            store.get(blob)


class TestOverMemory(SealedContract):
    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[Bench]:
        bench = SealedBench(MemoryBench(), tmp_path / "keys")
        yield bench
        bench.close()


class TestOverMemoryWithKeysOfSessions(SealedContract):
    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[Bench]:
        bench = SealedBench(MemoryBench(), tmp_path / "keys", Scope.SESSION)
        yield bench
        bench.close()


class TestOverDisk(SealedContract):
    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[Bench]:
        bench = SealedBench(DiskBench(tmp_path / "store"), tmp_path / "keys")
        yield bench
        bench.close()


class TestOverTiers(SealedContract):
    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[Bench]:
        bench = SealedBench(TieredBench(tmp_path / "store"), tmp_path / "keys")
        yield bench
        bench.close()


@pytest.mark.redis
class TestOverRedis(SealedContract):
    @pytest.fixture
    def bench(self, redis_server: RedisServer, tmp_path: Path) -> Iterator[Bench]:
        bench = SealedBench(RedisBench(redis_server), tmp_path / "keys")
        yield bench
        bench.close()
