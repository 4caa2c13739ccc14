"""Real servers that take each other's place: a Cluster with replicas, and a primary with Sentinels."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import redis

from tests.redis_server import RedisServer

SLOTS = 16384
_MASTERS = 3


class RedisCluster:
    """Three masters with a replica each. `with` (or `stop`) ends all of them."""

    def __init__(self, node_timeout: int = 1500, *options: str) -> None:
        """`node_timeout` milliseconds without an answer, and a master's replica takes its place."""
        self._stack = contextlib.ExitStack()
        settings = (
            *("--cluster-enabled", "yes", "--cluster-node-timeout", str(node_timeout)),
            *("--repl-diskless-sync-delay", "0", *options),
        )
        try:
            self.nodes = [self._stack.enter_context(RedisServer(*settings)) for _ in range(2 * _MASTERS)]
            self._join()
        except BaseException:
            self._stack.close()
            raise

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def master_of(self, key: str) -> RedisServer:
        """The node that serves `key` now, as most of them see it."""
        slot = int(ask(self.nodes[0], "CLUSTER KEYSLOT", key))
        for first, last, master, *_ in ask(self._any(), "CLUSTER SLOTS"):
            if first <= slot <= last:
                return next(node for node in self.nodes if node.port == master[1])
        raise AssertionError(f"nobody serves slot {slot}")

    def until_whole(self) -> None:
        """Wait until every node that lives sees all slots served."""
        for node in self.nodes:
            if alive(node):
                wait_for(lambda node=node: info(node, "cluster_state") == "ok")

    def stop(self) -> None:
        self._stack.close()

    def __enter__(self) -> RedisCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _any(self) -> RedisServer:
        return next(node for node in self.nodes if alive(node))

    def _join(self) -> None:
        first, *others = self.nodes
        masters, replicas = self.nodes[:_MASTERS], self.nodes[_MASTERS:]
        for at, master in enumerate(masters):
            slots = range(SLOTS * at // _MASTERS, SLOTS * (at + 1) // _MASTERS)
            ask(master, "CLUSTER ADDSLOTS", *slots)
            ask(master, "CLUSTER SET-CONFIG-EPOCH", at + 1)
        for other in others:
            ask(first, "CLUSTER MEET", "127.0.0.1", other.port)
        for node in self.nodes:
            wait_for(lambda node=node: info(node, "cluster_known_nodes") == str(2 * _MASTERS))
        for master, replica in zip(masters, replicas, strict=True):
            name = ask(master, "CLUSTER MYID").decode()
            wait_for(lambda replica=replica, name=name: _replicates(replica, name))
        for replica in replicas:
            wait_for(lambda replica=replica: link(replica) == "up")
        self.until_whole()


class Sentinels:
    """A primary and its replica, watched by three Sentinels, of which two agree. `with` ends all of them."""

    SERVICE = "tenuto-main"

    def __init__(self, down_after: int = 3000) -> None:
        """After `down_after` milliseconds without an answer the replica takes the primary's place."""
        self._stack = contextlib.ExitStack()
        try:
            quick = ("--repl-diskless-sync-delay", "0")
            self.primary = self._stack.enter_context(RedisServer(*quick))
            self.replica = self._stack.enter_context(
                RedisServer(*quick, "--replicaof", "127.0.0.1", str(self.primary.port))
            )
            wait_for(lambda: link(self.replica) == "up")
            self._sentinels = [self._stack.enter_context(RedisServer(sentinel=True)) for _ in range(3)]
            for sentinel in self._sentinels:
                ask(sentinel, "SENTINEL MONITOR", self.SERVICE, "127.0.0.1", self.primary.port, 2)
                ask(sentinel, "SENTINEL SET", self.SERVICE, "down-after-milliseconds", down_after)
                ask(sentinel, "SENTINEL SET", self.SERVICE, "failover-timeout", 5000)
            for sentinel in self._sentinels:
                wait_for(lambda sentinel=sentinel: self._knows_all(sentinel))
        except BaseException:
            self._stack.close()
            raise

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self._sentinels)
        return f"redis+sentinel://{hosts}/{self.SERVICE}/0"

    def until_failed_over(self) -> None:
        """Wait until every Sentinel names the replica."""
        for sentinel in self._sentinels:
            wait_for(lambda sentinel=sentinel: self._master(sentinel) == self.replica.port)

    def __enter__(self) -> Sentinels:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _master(self, sentinel: RedisServer) -> int:
        return int(ask(sentinel, "SENTINEL GET-MASTER-ADDR-BY-NAME", self.SERVICE)[1])

    def _knows_all(self, sentinel: RedisServer) -> bool:
        found = ask(sentinel, "SENTINEL MASTER", self.SERVICE)
        known = _pairs(found)
        return int(known["num-slaves"]) == 1 and int(known["num-other-sentinels"]) == 2


def ask(server: RedisServer, command: str, *arguments: Any) -> Any:
    with contextlib.closing(redis.Redis(port=server.port, socket_timeout=10, protocol=2)) as client:
        client.response_callbacks.clear()  # answers as the server gives them
        return client.execute_command(*command.split(), *arguments)


def info(server: RedisServer, field: str) -> str:
    """One line of CLUSTER INFO."""
    return _line(ask(server, "CLUSTER INFO"), field)


def link(replica: RedisServer) -> str:
    """ "up" once it has what its master has."""
    return _line(ask(replica, "INFO replication"), "master_link_status")


def alive(server: RedisServer) -> bool:
    try:
        return bool(ask(server, "PING"))
    except redis.exceptions.RedisError:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never comes"
        time.sleep(0.02)


def _replicates(replica: RedisServer, master: str) -> bool:
    try:
        ask(replica, "CLUSTER REPLICATE", master)
    except redis.exceptions.ResponseError:  # it has not heard of its master yet
        return False
    return True


def _line(text: bytes, field: str) -> str:
    found = re.search(rf"^{field}:(\S*)", text.decode(), re.MULTILINE)
    return "" if found is None else found[1]


def _pairs(flat: list[bytes]) -> dict[str, bytes]:
    return {name.decode(): value for name, value in zip(flat[::2], flat[1::2], strict=True)}
