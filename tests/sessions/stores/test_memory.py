"""The store in memory keeps every law of stores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from serialization.blobs import BlobClass
from sessions.stores.memory import MemoryStore
from tests.sessions.stores.benches import Bench, MemoryBench
from tests.sessions.stores.contract import StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def bench(self) -> Iterator[Bench]:
        bench = MemoryBench()
        yield bench
        bench.close()


def test_ages_follow_the_clock_that_was_given() -> None:
    now = [1000.0]
    store = MemoryStore(clock=lambda: now[0])
    blob = store.put(BlobClass.ROWS, b"x")
    now[0] += 50
    assert [info.age for info in store.list_blobs()] == [50.0]
    assert not store.delete_blob(blob, 50.5)
    assert store.delete_blob(blob, 50)
    assert store.now() == 1050
