"""Servers that die, stall, fill up, refuse or fall behind: a clear error, and what was acknowledged stays."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from engine.errors import StoreFull, StoreUnavailable
from serialization.blobs import BlobClass, BlobId
from sessions.stores.base import StoreConfig
from sessions.stores.open import open_store
from sessions.stores.redis import RedisStore
from tests.redis_cluster import RedisCluster, wait_for
from tests.redis_server import RedisServer
from tests.sessions.stores.benches import RedisBench

pytestmark = pytest.mark.redis
ROWS = BlobClass.ROWS
QUICK = StoreConfig(connect_timeout=1, reply_timeout=0.5, replica_timeout=0.2, attempts=3)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer(durable=True) as server:
        yield server


@pytest.fixture
def store(redis_server: RedisServer) -> Iterator[RedisStore]:
    bench = RedisBench(redis_server)
    store = RedisStore(redis_server.url, config=QUICK, sleep=lambda seconds: None)
    yield store
    store.close()
    bench.close()


def test_a_server_killed_during_puts_is_a_clear_error_and_loses_nothing(server: RedisServer) -> None:
    store = RedisStore(server.url, config=QUICK)
    assert store.swap("head", None, b"old")
    put: list[tuple[BlobId, bytes]] = []
    errors: list[StoreUnavailable] = []

    def save() -> None:
        try:
            while True:
                data = os.urandom(20_000)
                put.append((store.put(ROWS, data), data))
        except StoreUnavailable as error:
            errors.append(error)

    thread = threading.Thread(target=save)
    thread.start()
    while len(put) < 50:
        time.sleep(0.005)
    server.kill()
    thread.join()
    assert "\n" not in str(errors[0])
    with pytest.raises(StoreUnavailable) as caught:
        store.swap("head", b"old", b"new")
    assert caught.value.details["outcome"] == "unknown"
    server.start()
    assert store.read("head") == b"old"
    assert [store.get(blob) for blob, _ in put] == [data for _, data in put]
    for info in store.list_blobs():
        assert len(store.get(info.blob)) == info.nbytes
    assert store.swap("head", b"old", b"new")
    store.close()


def test_a_server_that_comes_back_in_time_is_not_noticed(server: RedisServer) -> None:
    store = open_store(server.url, config=StoreConfig(connect_timeout=1, attempts=10))
    blob = store.put(ROWS, b"x")
    assert store.swap("head", None, b"1")
    for act, answer in (
        (lambda: store.get(blob), b"x"),
        (lambda: store.swap("head", b"1", b"2"), True),
        (lambda: store.put(ROWS, b"x"), blob),
    ):
        server.kill()
        starting = threading.Timer(0.2, server.start)
        starting.start()
        assert act() == answer
        starting.join()  # it still asks the server whether it is there, which must not be killed meanwhile
    assert store.read("head") == b"2"
    store.close()


@pytest.mark.parametrize("acted", [False, True])
def test_a_lost_answer_to_a_swap_is_found_out(store: RedisStore, acted: bool, monkeypatch: Any) -> None:
    """Also when another writer moved the ref on before we could ask again."""
    other = RedisStore(f"redis://127.0.0.1:{store._client.connection_pool.connection_kwargs['port']}/0")
    store.swap("head", None, b"1")
    real = store._client.eval
    calls: list[Any] = []

    def lossy(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) > 1:
            return real(*arguments)
        if acted:
            real(*arguments)
            assert other.swap("head", b"2", b"3")
        raise redis.exceptions.ConnectionError("Connection closed by server.")

    monkeypatch.setattr(store._client, "eval", lossy)
    assert store.swap("head", b"1", b"2")
    assert other.read("head") == (b"3" if acted else b"2")
    assert calls[0] == calls[1]
    other.close()


def test_a_stalled_server_is_a_timeout_and_its_late_swap_counts_once(server: RedisServer) -> None:
    store = RedisStore(server.url, config=QUICK, sleep=lambda seconds: None)
    store.swap("head", None, b"1")
    os.kill(server.pid, signal.SIGSTOP)
    try:
        with pytest.raises(StoreUnavailable, match="not known"):
            store.swap("head", b"1", b"2")
        with pytest.raises(StoreUnavailable):
            store.get(BlobId("rows-b3-" + "0" * 64))
    finally:
        os.kill(server.pid, signal.SIGCONT)
    store.close()
    again = RedisStore(server.url)
    assert again.read("head") in (b"1", b"2")
    again.close()


def test_a_full_server_says_so_and_keeps_what_it_has(server: RedisServer) -> None:
    store = RedisStore(server.url)
    blob = store.put(ROWS, b"x" * 1000)
    store.swap("head", None, b"1")
    client = server.client()
    client.config_set("maxmemory", "1")
    with pytest.raises(StoreFull):
        store.put(ROWS, b"y" * 1000)
    with pytest.raises(StoreFull):
        store.swap("head", b"1", b"2")
    assert (store.get(blob), store.read("head")) == (b"x" * 1000, b"1")
    client.config_set("maxmemory", "0")
    assert store.swap("head", b"1", b"2")
    client.close()
    store.close()


def test_a_wrong_password_is_refused_at_once(server: RedisServer) -> None:
    client = server.client()
    client.config_set("requirepass", "right word")
    waits: list[float] = []
    for url in (server.url, server.url.replace("//", "//:wrong@")):
        with pytest.raises(StoreUnavailable, match="refuses us") as caught:
            RedisStore(url, sleep=waits.append)
        assert caught.value.details["permanent"]
    assert waits == []
    store = RedisStore(server.url.replace("//", "//:right%20word@"))
    assert store.swap("s", None, b"x")
    store.close()
    client.close()


def test_a_write_waits_for_the_replica_and_says_when_it_does_not_have_it(server: RedisServer) -> None:
    with RedisServer("--replicaof", "127.0.0.1", str(server.port)) as replica:
        follower = replica.client()
        deadline = time.monotonic() + 20
        while follower.info("replication")["master_link_status"] != "up":
            assert time.monotonic() < deadline
            time.sleep(0.02)
        store = RedisStore(server.url, config=QUICK)
        for number in range(20):
            blob = store.put(ROWS, b"%d" % number)
            assert follower.get(f"{store._prefix}b:{blob}") == b"%d" % number
        assert store.swap("head", None, b"1")
        assert follower.hexists(f"{store._prefix}refs", "head")
        with pytest.raises(StoreUnavailable, match="primary"):
            RedisStore(replica.url).put(ROWS, b"x")
        os.kill(replica.pid, signal.SIGSTOP)
        with pytest.raises(StoreUnavailable, match="0 of 1 replicas"):
            store.put(ROWS, b"late")
        with pytest.raises(StoreUnavailable, match="0 of 1 replicas") as caught:
            store.swap("head", b"1", b"2")
        assert caught.value.details["outcome"] == "unknown"
        os.kill(replica.pid, signal.SIGCONT)
        assert store.read("head") == b"2"
        assert store.swap("head", b"2", b"3")
        follower.close()
        store.close()


def test_replicas_that_are_asked_for_must_be_there(server: RedisServer) -> None:
    store = RedisStore(server.url, config=StoreConfig(replicas=1, replica_timeout=0.1))
    with pytest.raises(StoreUnavailable, match="0 of 1 replicas"):
        store.swap("head", None, b"1")
    store.close()


@pytest.mark.parametrize("verb", ["put", "swap"])
def test_a_write_that_the_next_server_does_not_have_is_made_again(server: RedisServer, verb: str) -> None:
    """Another one takes the server's place between a write and its acknowledgement: what counts is there."""
    store = RedisStore(server.url)
    store.put(ROWS, b"before")
    with RedisServer() as other:
        first: Any = store._client
        next_one: Any = other.client()
        real = first.eval

        def last(*arguments: Any) -> Any:
            answer = real(*arguments)
            store._client = next_one
            return answer

        first.eval = last
        if verb == "put":
            assert store.get(store.put(ROWS, b"x")) == b"x"
        else:
            assert store.swap("head", None, b"1")
            assert store.read("head") == b"1"
        assert store._client is next_one
        first.close()
    store.close()


def test_a_cluster_whose_master_is_killed_is_found_again_by_every_verb() -> None:
    """Also by those that ask one server past the Cluster's client."""
    with RedisCluster() as cluster:
        store = RedisStore(f"{cluster.url}?replicas=1", config=StoreConfig(connect_timeout=1))
        blob = store.put(ROWS, b"x")
        assert store.swap("head", None, b"1")
        master = cluster.master_of(store._refs)
        master.kill()
        with pytest.raises(StoreUnavailable):
            store.now()
        wait_for(lambda: cluster.master_of(store._refs) is not master)

        def comes_back() -> bool:
            try:
                return store.now() > 0
            except StoreUnavailable:
                return False

        wait_for(comes_back)
        assert store.get(blob) == b"x"
        assert store.read("head") == b"1"
        assert [info.blob for info in store.list_blobs()] == [blob]
        with pytest.raises(StoreUnavailable, match="0 of 1 replicas"):
            store.swap("head", b"1", b"2")
        master.start()

        def written() -> bool:
            try:
                store.put(ROWS, b"y")
            except StoreUnavailable:
                return False
            return True

        wait_for(written)
        assert store.swap("head", b"2", b"3")
        store.close()
