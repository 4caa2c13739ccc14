"""Retrying keeps every law of stores; it repeats what may be repeated, within bounds, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine.errors import StoreUnavailable
from serialization.blobs import BlobClass, Store, blob_id
from sessions.stores.base import StoreConfig
from sessions.stores.memory import MemoryStore
from sessions.stores.retry import RetryingStore
from tests.faults import FaultyStore
from tests.sessions.stores.benches import Bench, MemoryBench
from tests.sessions.stores.contract import StoreContract

ROWS = BlobClass.ROWS


class RetryingBench(MemoryBench):
    def make(self, tenant: str, config: StoreConfig) -> Store:
        return RetryingStore(super().make(tenant, config))


class TestRetryingStore(StoreContract):
    @pytest.fixture
    def bench(self) -> Iterator[Bench]:
        bench = RetryingBench()
        yield bench
        bench.close()


REPEATED: dict[str, Callable[[Store], Any]] = {
    "put": lambda store: store.put(ROWS, b"x"),
    "get": lambda store: store.get(blob_id(ROWS, b"there")),
    "has": lambda store: store.has([blob_id(ROWS, b"there")]),
    "list_blobs": lambda store: [info.blob for info in store.list_blobs()],
    "read": lambda store: store.read("s"),
    "read_many": lambda store: store.read_many(["s", "t"]),
    "list_refs": lambda store: list(store.list_refs("")),
    "hint": lambda store: store.hint({"h": b"x"}),
    "now": lambda store: int(store.now()) // 100,
}


def retrying(plan: str, attempts: int = 4) -> tuple[RetryingStore, FaultyStore, list[float]]:
    waits: list[float] = []
    faulty = FaultyStore(MemoryStore())
    faulty.store.put(ROWS, b"there")
    faulty.store.swap("s", None, b"1")
    faulty.plan = plan
    return RetryingStore(faulty, attempts, first=1.0, ceiling=3.0, sleep=waits.append), faulty, waits


@pytest.mark.parametrize("name", REPEATED)
@pytest.mark.parametrize("plan", ["", "r", "R", "rRr"])
def test_a_passing_fault_is_not_noticed(name: str, plan: str) -> None:
    expected = REPEATED[name](retrying("")[0])
    store, faulty, waits = retrying(plan)
    assert REPEATED[name](store) == expected
    assert (faulty.num_calls, len(waits)) == (len(plan) + 1, len(plan))


@pytest.mark.parametrize("name", REPEATED)
def test_a_lasting_fault_is_raised_after_the_last_attempt(name: str) -> None:
    store, faulty, waits = retrying("rrrrrrrr")
    with pytest.raises(StoreUnavailable):
        REPEATED[name](store)
    assert (faulty.num_calls, len(waits)) == (4, 3)


def test_waits_grow_up_to_a_ceiling() -> None:
    store, _, waits = retrying("r" * 7, attempts=8)
    store.read("s")
    assert all(full / 2 <= wait <= full for wait, full in zip(waits, [1, 2, 3, 3, 3, 3, 3], strict=True))


@pytest.mark.parametrize("letter", ["r", "R"])
def test_a_swap_is_never_repeated(letter: str) -> None:
    store, faulty, _ = retrying(letter)
    with pytest.raises(StoreUnavailable):
        store.swap("s", b"1", b"2")
    assert faulty.num_calls == 1
    assert store.read("s") == (b"2" if letter == "R" else b"1")


def test_a_lasting_refusal_is_not_tried_again() -> None:
    store, faulty, waits = retrying("")

    def refuse(name: str) -> bytes:
        raise StoreUnavailable("wrong password", permanent=True)

    faulty.store.read = refuse  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable, match="password"):
        store.read("s")
    assert waits == []
