"""The Redis user of docs/redis.md may do all that a store does, and nothing that it need not."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.errors import StoreUnavailable
from serialization.blobs import BlobClass
from sessions.stores.base import StoreConfig
from sessions.stores.redis import RedisStore
from tests.redis_server import RedisServer
from tests.sessions.stores.benches import RedisBench
from tests.sessions.stores.contract import StoreContract

pytestmark = pytest.mark.redis

PAGE = (Path(__file__).parents[3] / "docs" / "redis.md").read_text("utf-8")
ONCE = StoreConfig(attempts=1)


def rule() -> list[str]:
    """What stands behind the user's name."""
    (line,) = re.findall(r"^user tenuto (.*)$", PAGE, re.MULTILINE)
    return [">secret" if word == ">PASSWORD" else word for word in line.split()]


def more(where: str) -> list[str]:
    """What is told to be granted in one more case."""
    (line,) = re.findall(rf"^\| a {where}[^|]*\| `(.*)` \|$", PAGE, re.MULTILINE)
    return line.replace("\\|", "|").split()


COMMANDS = [word for word in rule() if word.startswith("+")]


def grant(server: RedisServer, *words: str) -> None:
    client: Any = server.client()
    client.execute_command("ACL", "SETUSER", "tenuto", "reset", *words)
    client.close()


def address(server: RedisServer, scheme: str = "redis", path: str = "/0") -> str:
    return f"{scheme}://tenuto:secret@127.0.0.1:{server.port}{path}"


def use_all(url: str) -> None:
    """Every verb of a store, and of each script every way through."""
    store = RedisStore(url, config=ONCE)
    rows = store.put(BlobClass.ROWS, b"rows")
    manifest = store.put(BlobClass.MANIFEST, b"manifest")
    assert {store.put(BlobClass.ROWS, b"rows"), store.put(BlobClass.MANIFEST, b"manifest")} == {
        rows,
        manifest,
    }
    assert store.get(rows) == b"rows"
    assert store.has([rows, manifest]) == (True, True)
    assert len(list(store.list_blobs())) == 2
    assert store.delete_blob(rows, 0)
    assert not store.delete_blob(rows, 0)
    store.sweep(0)
    assert store.swap("a", None, b"1")
    assert store.swap("a", b"1", None, guard=None)
    assert not store.swap("a", None, b"1", guard=("b", b"2"))
    store.hint({"c": b"3"})
    assert store.read("c") == b"3"
    assert store.last_refs("c", None, 1) == tuple(store.list_refs("c"))
    store._client.unlink(store._names)  # lost, and made anew
    assert [name for name, _ in store.list_refs("")] == ["c"]
    assert store.since() is not None
    assert store.now() > 0
    assert store.usage() > 0
    assert store.check_index() == ()
    store.rebuild({"d": b"4"})
    store.wipe()
    store.close()


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        grant(server, *rule())
        yield server


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisServer]:
    """One node that serves every slot."""
    with RedisServer("--cluster-enabled", "yes") as server:
        client: Any = server.client()
        client.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
        until = time.monotonic() + 30
        while not re.search(r"cluster_state\W+ok", str(client.execute_command("CLUSTER INFO"))):
            assert time.monotonic() < until
            time.sleep(0.02)
        client.close()
        grant(server, *rule(), *more("Cluster"))
        yield server


class TestRedisStoreOfThatUser(StoreContract):
    @pytest.fixture
    def bench(self, server: RedisServer) -> Iterator[RedisBench]:
        bench = RedisBench(server, address(server))
        yield bench
        bench.close()


def test_nothing_else_may_be_read_or_done(server: RedisServer) -> None:
    import redis

    client: Any = redis.Redis(port=server.port, username="tenuto", password="secret")
    for command in (
        "FLUSHALL",
        "KEYS *",
        "CONFIG GET maxmemory",
        "SHUTDOWN",
        "ACL LIST",
        "MONITOR",
        "GET other",
    ):
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.execute_command(*command.split())
    client.close()


@pytest.mark.parametrize("without", COMMANDS)
def test_each_command_that_is_granted_is_needed(server: RedisServer, without: str) -> None:
    admin: Any = server.client()
    admin.flushall()
    grant(server, *(word for word in rule() if word != without))
    try:
        with pytest.raises(StoreUnavailable, match="refuses us") as refused:
            use_all(address(server))
        assert refused.value.details["permanent"]
    finally:
        grant(server, *rule())
        admin.close()


def test_what_a_cluster_needs_beside_it_is_told(cluster: RedisServer) -> None:
    url = address(cluster, "redis+cluster", "")
    use_all(url)
    for without in more("Cluster"):
        if without in ("+wait", "+asking"):  # with replicas, and while slots are moved
            continue
        grant(cluster, *rule(), *(word for word in more("Cluster") if word != without))
        with pytest.raises(StoreUnavailable):
            use_all(url)
    grant(cluster, *rule(), *more("Cluster"))


@pytest.mark.parametrize(("where", "path"), [("replica", "/0"), ("database number", "/3")])
def test_what_else_is_needed_where_is_told(where: str, path: str) -> None:
    with RedisServer() as primary:
        options: Sequence[str] = ("--replicaof", "127.0.0.1", str(primary.port))
        if where != "replica":
            options = ()
        with RedisServer(*options):
            admin: Any = primary.client()
            until = time.monotonic() + 30
            while options and not admin.info("replication")["connected_slaves"]:
                assert time.monotonic() < until
                time.sleep(0.02)
            grant(primary, *rule())
            with pytest.raises(StoreUnavailable, match="refuses us"):
                use_all(address(primary, path=path))
            admin.flushall()
            grant(primary, *rule(), *more(where))
            use_all(address(primary, path=path))
            admin.close()
