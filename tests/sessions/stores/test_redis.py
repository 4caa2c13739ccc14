"""The Redis store keeps every law of stores on one server and in a Cluster; and what only Redis does."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from engine.errors import BlobMissing, IndexDamaged, StoreUnavailable, UnknownVersion, UsageError
from serialization.blobs import BlobClass
from sessions.stores.base import StoreConfig
from sessions.stores.memory import MemoryStore
from sessions.stores.open import open_store
from sessions.stores.redis import RedisStore
from sessions.stores.tiered import CacheTier, TieredStore
from tests.redis_server import RedisServer
from tests.sessions.stores.benches import SMALL, RedisBench
from tests.sessions.stores.contract import StoreContract

pytestmark = pytest.mark.redis
ROWS, MANIFEST = BlobClass.ROWS, BlobClass.MANIFEST


@pytest.fixture
def bench(redis_server: RedisServer) -> Iterator[RedisBench]:
    bench = RedisBench(redis_server)
    yield bench
    bench.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisServer]:
    """A Cluster of one node that serves every slot."""
    with RedisServer("--cluster-enabled", "yes") as server:
        client: Any = server.client()
        client.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
        deadline = time.monotonic() + 15
        while not re.search(r"cluster_state\W+ok", str(client.execute_command("CLUSTER INFO"))):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        client.close()
        yield server


class TestRedisStore(StoreContract):
    @pytest.fixture
    def bench(self, redis_server: RedisServer) -> Iterator[RedisBench]:
        bench = RedisBench(redis_server)
        yield bench
        bench.close()


class TestRedisClusterStore(StoreContract):
    @pytest.fixture
    def bench(self, cluster: RedisServer) -> Iterator[RedisBench]:
        bench = RedisBench(cluster, f"redis+cluster://127.0.0.1:{cluster.port}")
        yield bench
        bench.close()


def test_rows_live_on_while_they_are_read_or_put(bench: RedisBench) -> None:
    store = bench.open(config=StoreConfig(rows_ttl=100, manifest_ttl=200))
    assert store.rows_expire
    for cls, ttl in ((ROWS, 100_000), (BlobClass.POINT, 100_000), (MANIFEST, 200_000)):
        blob = store.put(cls, b"x")
        for use in (lambda blob=blob: store.get(blob), lambda cls=cls: store.put(cls, b"x")):
            bench.raw.pexpire(bench.key(blob), 50_000)
            use()
            assert ttl - 5000 < bench.raw.pttl(bench.key(blob)) <= ttl


def test_manifests_and_refs_never_expire_by_default(bench: RedisBench) -> None:
    store = bench.open()
    blob = store.put(MANIFEST, b"conversation")
    store.swap("s", None, b"x")
    assert bench.raw.pttl(bench.key(blob)) == -1
    assert bench.raw.pttl(f"{bench.prefix}refs") == -1
    assert bench.raw.pttl(bench.key(store.put(ROWS, b"rows"))) > 0


def test_nothing_expires_where_that_is_asked(bench: RedisBench) -> None:
    store = bench.open(config=StoreConfig(rows_ttl=None))
    assert not store.rows_expire
    blob = store.put(ROWS, b"x")
    assert bench.raw.pttl(bench.key(blob)) == -1
    bench.raw.pexpire(bench.key(blob), 50_000)
    store.put(ROWS, b"x")
    assert bench.raw.pttl(bench.key(blob)) == -1


def test_an_expired_blob_is_a_miss_and_its_age_is_swept(bench: RedisBench) -> None:
    store = bench.open()
    blob, stays = store.put(ROWS, b"expires"), store.put(ROWS, b"stays")
    bench.raw.pexpire(bench.key(blob), 1)
    time.sleep(0.05)
    with pytest.raises(BlobMissing):
        store.get(blob)
    assert [info.blob for info in store.list_blobs()] == [stays]
    assert bench.raw.zcard(f"{bench.prefix}ages") == 2
    store.sweep(0)
    assert bench.raw.zrange(f"{bench.prefix}ages", 0, -1) == [stays.encode()]


def test_blobs_are_listed_though_their_ages_are_lost(bench: RedisBench) -> None:
    store = bench.open()
    blob = store.put(MANIFEST, b"x")
    bench.raw.delete(f"{bench.prefix}ages")
    assert [(info.blob, info.age) for info in store.list_blobs()] == [(blob, 0.0)]
    assert not store.delete_blob(blob, 10)
    bench.age(blob, 20)
    assert store.delete_blob(blob, 10)


def test_listing_more_than_a_batch_is_complete(bench: RedisBench) -> None:
    store = bench.open()
    pipe = bench.raw.pipeline()
    blobs = {f"rows-b3-{number:064x}" for number in range(1700)}
    for blob in blobs:
        pipe.set(f"{bench.prefix}b:{blob}", b"12")
    pipe.execute()
    found = list(store.list_blobs())
    assert {info.blob for info in found} == blobs
    assert len(found) == len(blobs)
    store.hint({f"n/{number}": b"x" for number in range(1700)})
    assert len(list(store.list_refs("n/"))) == 1700


def test_names_are_kept_in_order_beside_the_refs(bench: RedisBench) -> None:
    store, names = bench.open(), f"{bench.prefix}names"
    store.swap("b", None, b"1")
    store.hint({"a": b"2", "c": b"3"})
    store.swap("b", b"1", None)
    assert bench.raw.zrange(names, 0, -1) == [b"a", b"c"]
    store.rebuild({"d": b"4"})
    assert bench.raw.zrange(names, 0, -1) == [b"d"]
    assert store.last_refs("", None, 5) == (("d", b"4"),)


@pytest.mark.parametrize("lost", ["all", "one", "none, and one too many"])
def test_an_order_that_was_lost_is_made_anew(bench: RedisBench, lost: str) -> None:
    store, names = bench.open(), f"{bench.prefix}names"
    store.hint({f"s/{number}": b"x" for number in range(5)})
    match lost:
        case "all":
            bench.raw.delete(names)
        case "one":
            bench.raw.zrem(names, "s/3")
        case _:
            bench.raw.zadd(names, {"s/9": 0})
    assert [name for name, _ in store.last_refs("s/", None, 2)] == ["s/4", "s/3"]
    assert bench.raw.zcard(names) == 5


def test_a_list_goes_on_after_a_server_that_was_away_for_a_moment(bench: RedisBench) -> None:
    waits: list[float] = []
    store = RedisStore(bench.url, config=SMALL, sleep=waits.append)
    store.hint({f"n/{number:04d}": b"x" for number in range(1200)})
    blobs = {store.put(ROWS, b"%d" % number) for number in range(3)}
    listing = store.list_refs("n/")
    first = next(listing)
    ask, fail = store._client.eval, [True]

    def flaky(*args: object) -> object:
        if fail:
            fail.clear()
            raise redis.exceptions.ConnectionError("away")
        return ask(*args)

    store._client.eval = flaky
    assert len({first, *listing}) == 1200
    assert (len(waits), fail) == (1, [])
    scan, fail[:] = store._client.scan, [True]
    store._client.scan = lambda *args, **how: flaky_scan(scan, fail, args, how)
    assert {info.blob for info in store.list_blobs()} == blobs
    assert (len(waits), fail) == (2, [])
    store.close()


def flaky_scan(scan: Any, fail: list[bool], args: Any, how: Any) -> Any:
    if fail:
        fail.clear()
        raise redis.exceptions.ConnectionError("away")
    return scan(*args, **how)


def test_all_keys_of_a_tenant_share_one_slot(bench: RedisBench) -> None:
    store = bench.open()
    store.put(ROWS, b"x")
    store.swap("s", None, b"x")
    store.rebuild({"s": b"y"})
    assert all(key.startswith(bench.prefix.encode()) for key in bench.raw.scan_iter())
    assert len(list(bench.raw.scan_iter(f"{bench.prefix}aside:*"))) == 1


def test_a_newer_version_is_refused(bench: RedisBench) -> None:
    bench.open()
    bench.raw.set(f"{bench.prefix}version", b"2")
    with pytest.raises(UnknownVersion, match="version"):
        bench.open()


def test_a_key_of_another_type_is_damage_and_is_rebuilt(bench: RedisBench) -> None:
    store = bench.open()
    bench.raw.set(f"{bench.prefix}refs", b"not a hash")
    with pytest.raises(IndexDamaged):
        store.read("s")
    assert len(store.check_index()) == 1
    store.rebuild({"s": b"x"})
    assert store.read("s") == b"x"


def test_a_server_that_may_evict_refs_is_reported(bench: RedisBench) -> None:
    store = bench.open()
    bench.raw.config_set("maxmemory-policy", "allkeys-lru")
    assert store.check_index() == ()
    bench.raw.config_set("maxmemory", "500mb")
    try:
        assert "volatile-lru" in store.check_index()[0]
    finally:
        bench.raw.config_set("maxmemory", "0")
        bench.raw.config_set("maxmemory-policy", "noeviction")


def test_it_tells_since_when_its_refs_are_there(bench: RedisBench) -> None:
    """Also on a Redis that lost them, or evicted them while it was used."""
    store = bench.open()
    since = store.since()
    assert since is not None
    assert store.now() - 60 < since <= store.now()
    store.swap("s", None, b"x")
    store.hint({"n": b"x"})
    assert store.since() == since
    assert bench.open().since() == since
    assert dict(store.list_refs("")) == {"s": b"x", "n": b"x"}
    assert store.check_index() == ()
    bench.raw.delete(f"{bench.prefix}refs")
    lost = store.now()
    assert store.since() >= lost
    store.hint({"n": b"x"})
    assert store.since() >= lost
    store.swap("s", None, b"x")
    then = store.since()
    assert then >= lost
    assert store.now() > store.since() == then
    store.rebuild({"s": b"y"})
    assert store.since() >= then


def test_a_number_of_replicas_may_stand_in_the_address(bench: RedisBench) -> None:
    without = bench.open()
    assert without.swap("s", None, b"x")
    for query in ("?replicas=1", "?socket_timeout=9&replicas=1"):
        store = RedisStore(f"{bench.url}{query}", config=StoreConfig(replica_timeout=0.1))
        with pytest.raises(StoreUnavailable, match="0 of 1 replicas"):
            store.put(ROWS, b"x")
        store.close()
    store = RedisStore(f"{bench.url}?replicas=0")
    assert store.swap("s", b"x", b"y")
    store.close()


def test_sentinel_leads_to_the_primary() -> None:
    with RedisServer() as primary, RedisServer(sentinel=True) as sentinel:
        client: Any = sentinel.client()
        client.execute_command("SENTINEL", "MONITOR", "tenuto-main", "127.0.0.1", primary.port, 1)
        client.close()
        store = open_store(f"redis+sentinel://127.0.0.1:{sentinel.port}/tenuto-main/0")
        assert store.get(store.put(ROWS, b"x")) == b"x"
        assert store.swap("s", None, b"x")
        store.close()
        plain = RedisStore(primary.url)
        assert plain.read("s") == b"x"
        plain.close()


def test_a_unix_socket_is_an_address_too() -> None:
    with RedisServer("--unixsocket", "redis.sock") as server:
        store = open_store(f"unix://{server.folder}/redis.sock?db=0")
        assert store.get(store.put(ROWS, b"x")) == b"x"
        store.close()


@pytest.mark.parametrize(
    "url",
    [
        "redis://host:port",
        "redis+sentinel://127.0.0.1:1",
        "redis+sentinel:///main",
        "redis+cluster://127.0.0.1:1/3",
        "redis+cluster://127.0.0.1:many",
        "redis://127.0.0.1:1?replicas=some",
        "redis://127.0.0.1:1?replicas=1&replicas=2",
        "redis+sentinel://127.0.0.1:1/main?replicas=-1",
    ],
)
def test_addresses_that_make_no_sense_are_refused(url: str) -> None:
    with pytest.raises(UsageError):
        open_store(url)


def test_refreshed_blobs_live_as_long_as_new_ones(bench: RedisBench) -> None:
    store = bench.open(config=StoreConfig(rows_ttl=100))
    rows, manifest = store.put(ROWS, b"rows"), store.put(MANIFEST, b"manifest")
    for blob in (rows, manifest):
        bench.raw.pexpire(bench.key(blob), 5000)
    store.refresh([rows, manifest])
    assert bench.raw.pttl(bench.key(rows)) > 95_000
    assert bench.raw.pttl(bench.key(manifest)) <= 5000  # kept for ever by its class: nothing to renew


def test_what_is_read_from_a_quick_tier_is_refreshed_in_the_last(bench: RedisBench) -> None:
    last = bench.open(config=StoreConfig(rows_ttl=100))
    store = TieredStore([CacheTier(MemoryStore(), 1 << 20)], last)
    blob = store.put(ROWS, b"rows")
    bench.raw.pexpire(bench.key(blob), 5000)
    store.get(blob)
    assert bench.raw.pttl(bench.key(blob)) <= 5000
    store.refresh([blob])
    assert bench.raw.pttl(bench.key(blob)) > 95_000
    assert [tier.kind for tier in store.tiers()] == ["memory", "redis"]


def test_usage_is_of_every_key_and_follows_what_expires(bench: RedisBench) -> None:
    store = bench.open()
    store.put(ROWS, bytes(5000))
    blob = store.put(ROWS, bytes(7000))
    store.swap("s", None, b"x" * 100)
    before = store.usage()
    assert before >= 12_100
    bench.raw.delete(bench.key(blob))  # as if it had expired: nobody is told
    assert before - 7500 < store.usage() <= before - 7000
