"""Stats add up, whatever shares what, and take no more memory for more sessions."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from engine.errors import UsageError
from engine.runner import Engine
from serialization.blobs import BlobClass, Store
from serialization.manifest import Message
from sessions.keyring.master import MasterKeys
from sessions.keyring.ring import Keyring
from sessions.manager import SessionManager
from sessions.names import new_session_id, session_ref
from sessions.policy import Policy
from sessions.stats import StoreStats, count
from sessions.stores.base import tenant_key
from sessions.stores.disk import DiskStore
from sessions.stores.memory import MemoryStore
from sessions.stores.open import open_store
from sessions.stores.redis import RedisStore
from sessions.stores.tenants import stored_tenants
from tests.redis_server import RedisServer
from tests.sessions.clock import Clock

DAY = 86400.0


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    return MemoryStore(clock=clock)


@pytest.fixture
def manager(store: Store, engine: Engine) -> SessionManager:
    return SessionManager(store, engine, Policy(lease=5, grace=10))


def save(manager: SessionManager, name: str, length: int, turns: int = 1) -> str:
    engine, session = manager.engine, manager.create(name)
    seq = engine.create()
    said = []
    for turn in range(turns):
        engine.feed(seq, [(i + len(name)) % 80 + 5 for i in range(length)])
        said.append(Message("user", f"{name} {turn}", 0, 0))
        manager.save(session, seq, said)
    session.close()
    engine.close(seq)
    return session.id


def used(stats: StoreStats) -> int:
    return sum(each.own + each.shared for each in stats.classes.values())


def test_an_empty_store_has_nothing(store: Store) -> None:
    stats = count(store)
    assert (stats.num_sessions, stats.total_bytes, stats.oldest) == (0, 0, None)
    assert stats.sharing is stats.compression is None


def test_every_byte_is_of_one_class_one_age_and_one_sharing(
    manager: SessionManager, store: Store, clock: Clock
) -> None:
    first = save(manager, "one", 600, turns=2)
    clock.now += 3 * DAY
    fork = manager.fork("one", "other").id
    manager.pin("one", "kept")
    clock.now += 60
    save(manager, "alone", 300)
    stats = count(store)
    assert (stats.num_sessions, stats.num_forks, stats.num_pins) == (3, 1, 1)
    assert (stats.num_turns, stats.num_tokens) == (5, 2 * 1200 + 300)
    assert stats.oldest is not None
    assert stats.newest is not None
    assert stats.oldest.session == first
    assert stats.newest.session not in (first, fork)
    listed = list(store.list_blobs())
    assert sum(each.num_blobs for each in stats.classes.values()) == len(listed)
    assert used(stats) + sum(each.unreferenced for each in stats.classes.values()) == sum(
        info.nbytes for info in listed
    )
    assert stats.classes[BlobClass.MANIFEST].unreferenced > 0  # of the first turn
    assert sum(each.nbytes for each in stats.ages.values()) == sum(info.nbytes for info in listed)
    assert stats.ages["week"].num_sessions == 1
    assert stats.ages["hour"].num_sessions == 2
    assert stats.total_bytes == store.usage() == stats.index_bytes + sum(info.nbytes for info in listed)


def test_it_agrees_with_what_each_session_is_told_to_take(manager: SessionManager, store: Store) -> None:
    save(manager, "one", 600)
    manager.fork("one", "other", 300)
    manager.pin("one", "kept")
    save(manager, "alone", 300)
    stats, sessions, usage = count(store), manager.list(), manager.usage()
    assert sum(each.own for each in stats.classes.values()) == sum(info.own_bytes for info in sessions)
    assert used(stats) == usage.rows_bytes + usage.manifest_bytes
    assert sum(each.unreferenced for each in stats.classes.values()) == usage.superseded_bytes
    assert stats.total_bytes == usage.total


def test_a_session_and_its_pins_share_nothing_with_another(manager: SessionManager, store: Store) -> None:
    save(manager, "one", 600)
    for name in ("a", "b", "c"):
        manager.pin("one", name)
    stats = count(store)
    assert stats.num_pins == 3
    assert stats.sharing == 1.0
    assert all(each.shared == 0 for each in stats.classes.values())
    manager.delete("one")
    assert count(store).sharing == 1.0  # the pins are one user still
    assert (count(store).num_sessions, count(store).num_pins) == (0, 3)


def test_forks_are_counted_as_often_as_they_would_be_stored(manager: SessionManager, store: Store) -> None:
    save(manager, "one", 600)
    for _ in range(3):
        manager.fork("one")
    stats = count(store)
    assert stats.sharing == 4.0
    rows = sum(ref.nbytes for ref in manager.manifest("one").blobs())
    raw = sum(ref.raw_nbytes for ref in manager.manifest("one").blobs())
    assert (stats.logical_bytes, stats.unique_bytes, stats.raw_bytes) == (4 * rows, rows, raw)
    assert stats.compression == raw / rows > 1


def test_what_is_missing_or_cannot_be_read_is_told(manager: SessionManager, store: MemoryStore) -> None:
    save(manager, "one", 600)
    save(manager, "bad", 300)
    manifest = manager.manifest("one")
    store.delete_blob(manifest.chunks[0].blobs[0].ref.blob, 0)
    broken = manager.manifest("bad").session
    value = store.read(session_ref(broken))
    assert value is not None
    assert store.swap(session_ref(broken), value, b"manifest-b3-" + b"0" * 64)
    stats = count(store)
    assert (stats.num_sessions, stats.num_unreadable, stats.num_missing) == (1, 1, 1)


@pytest.mark.redis
@pytest.mark.parametrize("kind", ["disk", "redis", "sealed"])
def test_every_kind_of_store_is_counted_alike(
    kind: str, engine: Engine, tmp_path: Path, redis_server: RedisServer
) -> None:
    keyring = Keyring(tmp_path / "keys", MasterKeys([b"m" * 32])) if kind == "sealed" else None
    redis_server.client().flushall()
    url = redis_server.url if kind == "redis" else str(tmp_path / "store")
    store = open_store(url, keyring=keyring)
    manager = SessionManager(store, engine, Policy(lease=5, grace=10))
    save(manager, "one", 600)
    manager.fork("one", "other")
    stats = count(store)
    assert (stats.num_sessions, stats.sharing, stats.num_tokens) == (2, 2.0, 1200)
    assert stats.total_bytes - stats.index_bytes == sum(info.nbytes for info in store.list_blobs())
    store.close()


def test_memory_does_not_grow_with_what_sessions_hold(manager: SessionManager, store: MemoryStore) -> None:
    """Manifests come and go one at a time: only the refs themselves are listed at once."""

    def peak() -> int:
        tracemalloc.start()
        count(store)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    save(manager, "one", 1500)
    value = store.read(session_ref(manager.find("one")))
    assert value is not None
    peak()  # what is imported and cached the first time
    few = peak()
    store.hint({session_ref(new_session_id()): value for _ in range(2000)})
    grown = peak() - few
    assert count(store).num_sessions == 2001
    assert grown < 2000 * 1000  # a manifest alone has several kilobytes, 20 of them in memory


# --- which tenants there are ----------------------------------------------------------------------


@pytest.mark.redis
def test_tenants_are_found_wherever_a_store_is(tmp_path: Path, redis_server: RedisServer) -> None:
    redis_server.client().flushall()
    folder = tmp_path / "store"
    for url in (str(folder), f"disk:{folder}", f"file://{folder}", redis_server.url):
        assert stored_tenants(url) == frozenset()
        assert not folder.exists()
    for tenant in ("ann", "bob"):
        DiskStore(folder, tenant).close()
        RedisStore(redis_server.url, tenant).close()
    there = {tenant_key("ann"), tenant_key("bob")}
    tiers = f"tiered:memory=1M,disk=1M@{tmp_path / 'tier'},"
    for url in (
        str(folder),
        f"disk:{folder}",
        f"file://{folder}",
        redis_server.url,
        f"{redis_server.url}?replicas=0",
        f"{tiers}{redis_server.url}",
    ):
        assert stored_tenants(url) == there, url
    with pytest.raises(UsageError):
        stored_tenants("memory:")
