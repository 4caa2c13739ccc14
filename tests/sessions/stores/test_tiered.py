"""Tiers keep every law of stores, whatever the quick ones forget, damage or refuse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import BlobMissing, ConfigError, StoreUnavailable
from serialization.blobs import BlobClass, BlobId, Store, blob_id
from sessions.stores.base import StoreConfig
from sessions.stores.disk import DiskStore
from sessions.stores.memory import MemoryStore
from sessions.stores.tiered import CacheTier, TieredStore
from tests.faults import FaultyStore
from tests.sessions.stores.benches import Bench, DiskBench, MemoryBench
from tests.sessions.stores.contract import StoreContract

ROWS = BlobClass.ROWS


class TieredBench(DiskBench):
    """Memory over disk. What happens to the disk's blobs happens to the memory's as well."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.quick = MemoryBench()

    def make(self, tenant: str, config: StoreConfig) -> Store:
        return TieredStore(
            [CacheTier(self.quick.make(tenant, config), 1 << 20)], super().make(tenant, config)
        )

    def write_blob(self, blob: BlobId, data: bytes) -> None:
        super().write_blob(blob, data)
        self.quick.write_blob(blob, data)

    def remove_blob(self, blob: BlobId) -> None:
        super().remove_blob(blob)
        self.quick.remove_blob(blob)


class TestTieredStore(StoreContract):
    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[Bench]:
        bench = TieredBench(tmp_path / "store")
        yield bench
        bench.close()


def tiers(budget: int = 10_000) -> tuple[TieredStore, MemoryStore, FaultyStore]:
    quick, last = MemoryStore(), FaultyStore(MemoryStore())
    return TieredStore([CacheTier(quick, budget)], last), quick, last


def held(store: Store) -> set[BlobId]:
    return {info.blob for info in store.list_blobs()}


def test_what_was_put_or_read_once_is_read_above_the_last_tier() -> None:
    store, quick, last = tiers()
    blob = store.put(ROWS, b"x" * 100)
    other = last.store.put(ROWS, b"by another machine")
    assert store.get(other) == b"by another machine"
    last.plan = "r" * 100
    assert (store.get(blob), store.get(other)) == (b"x" * 100, b"by another machine")
    assert held(quick) == {blob, other}


def test_a_put_that_the_last_tier_refuses_is_nowhere() -> None:
    store, quick, last = tiers()
    last.plan = "r"
    with pytest.raises(StoreUnavailable):
        store.put(ROWS, b"x")
    assert held(quick) == set()


@pytest.mark.parametrize("disk", [False, True])
def test_a_tier_never_holds_more_than_its_budget(disk: bool, tmp_path: Path) -> None:
    quick: Store = DiskStore(tmp_path) if disk else MemoryStore()
    budget = quick.usage() + 1000
    last = MemoryStore()
    store = TieredStore([CacheTier(quick, budget)], last)
    blobs = []
    for number in range(30):
        blobs.append(store.put(ROWS, bytes([number]) * 230))
        assert quick.usage() <= budget
    assert held(quick) == set(blobs[-4:])
    store.put(ROWS, bytes(1001))
    assert quick.usage() <= budget
    assert [store.get(blob) for blob in blobs] == [bytes([number]) * 230 for number in range(30)]
    assert quick.usage() <= budget
    store.close()


def test_the_least_recently_used_go_first() -> None:
    store, quick, _ = tiers(1000)
    one, two, three = (store.put(ROWS, bytes([number]) * 300) for number in range(3))
    store.get(one)
    four = store.put(ROWS, b"4" * 300)
    assert held(quick) == {one, three, four}
    assert two not in held(quick)


def test_what_other_processes_put_into_a_shared_tier_counts(tmp_path: Path) -> None:
    empty = DiskStore(tmp_path)
    budget = empty.usage() + 1000
    last = MemoryStore()
    stores = [TieredStore([CacheTier(DiskStore(tmp_path), budget)], last) for _ in range(2)]
    for number in range(20):
        stores[number % 2].put(ROWS, bytes([number]) * 150)
    stores[0].put(ROWS, b"a" * 300)
    stores[1].put(ROWS, b"b" * 300)
    assert empty.usage() <= budget + 450  # each sees the other's last put only when it makes room
    empty.close()
    for store in stores:
        store.close()


def test_damage_in_a_quick_tier_is_healed_from_the_last_and_reported(tmp_path: Path) -> None:
    bench = DiskBench(tmp_path)
    store = TieredStore([CacheTier(bench.open(), 1 << 20)], MemoryStore())
    blob = store.put(ROWS, b"content")
    bench.write_blob(blob, b"CONTENT")
    assert store.get(blob) == b"content"
    assert bench.raw_blob(blob) == b"content"
    assert [fault.startswith("cache tier: blob") for fault in store.check_index()] == [True]
    bench.close()


def test_a_quick_tier_that_cannot_be_reached_never_fails_a_call() -> None:
    quick = FaultyStore(MemoryStore(), "r" * 1000)
    store = TieredStore([CacheTier(quick, 1000)], MemoryStore())
    blob = store.put(ROWS, b"x")
    assert store.get(blob) == b"x"
    assert store.delete_blob(blob, 0)
    assert len(store.check_index()) > 0


def test_a_delete_reaches_every_tier() -> None:
    store, quick, _ = tiers()
    blob = store.put(ROWS, b"x")
    assert store.delete_blob(blob, 0)
    assert held(quick) == set()
    with pytest.raises(BlobMissing):
        store.get(blob)


def test_refs_are_in_the_last_tier_alone() -> None:
    store, quick, last = tiers()
    store.swap("s", None, b"x")
    store.hint({"h": b"x"})
    assert list(quick.list_refs("")) == []
    assert [name for name, _ in last.list_refs("")] == ["h", "s"]


def test_presence_is_asked_of_the_last_tier() -> None:
    store, _, last = tiers()
    store.put(ROWS, b"x")
    last.store.delete_blob(blob_id(ROWS, b"x"), 0)
    assert store.has([blob_id(ROWS, b"x")]) == (False,)


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError):
        CacheTier(MemoryStore(), 0)
