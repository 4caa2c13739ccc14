"""Killed at any moment of saves and gc, a store tells the bytes that it has, and a quota goes by those."""

from __future__ import annotations

import os
import random
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from engine.errors import QuotaExceeded
from engine.runner import Engine
from serialization.blobs import Store
from sessions.manager import SessionManager
from sessions.policy import Policy
from sessions.quota import Quota
from sessions.stores.base import tenant_key
from sessions.stores.disk import DiskStore
from sessions.stores.redis import RedisStore
from tests.redis_server import RedisServer

POLICY = Policy(lease=0.15, grace=0.2, quota=1 << 30, budget=1 << 29)


class Kept(ABC):
    """A store, and a count of its bytes that asks nothing of it."""

    @abstractmethod
    def open(self) -> Store: ...

    @abstractmethod
    def count(self) -> int: ...


class KeptOnDisk(Kept):
    def __init__(self, root: Path) -> None:
        self.root = root

    def open(self) -> Store:
        return DiskStore(self.root)

    def count(self) -> int:
        folder = self.root / "tenants" / tenant_key("default")
        return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


class KeptInRedis(Kept):
    def __init__(self, server: RedisServer) -> None:
        self.server = server

    def open(self) -> Store:
        return RedisStore(self.server.url)

    def count(self) -> int:
        total = 0
        client: Any = self.server.client()
        with closing(client):
            for key in client.keys("tenuto:*"):
                total += len(key)
                match client.type(key):
                    case b"string":
                        total += client.strlen(key)
                    case b"hash":
                        fields = client.hgetall(key).items()
                        total += sum(len(name) + len(value) for name, value in fields)
                    case b"zset":
                        total += sum(len(name) + 8 for name in client.zrange(key, 0, -1))
        return total


@pytest.fixture(params=["disk", pytest.param("redis", marks=pytest.mark.redis)])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Kept]:
    if request.param == "disk":
        yield KeptOnDisk(tmp_path / "store")
        return
    server: RedisServer = request.getfixturevalue("redis_server")
    with closing(server.client()) as client:
        client.flushall()
    yield KeptInRedis(server)


def save_and_collect_forever(engine: Engine, kept: Kept, began: int) -> None:
    """Sessions are begun, saved, pinned, deleted and collected, over and over."""
    store = kept.open()
    manager = SessionManager(store, engine, POLICY)
    words = engine.tokenizer.encode("the quick brown fox jumps over the lazy dog " * 8)
    number = 0
    while True:
        number += 1
        seq = engine.create()
        session = manager.create()
        for _ in range(3):
            engine.feed(seq, words)
            manager.save(session, seq, ())
            os.write(began, b".")
        session.close()
        engine.close(seq)
        if number % 3 == 0:
            manager.pin(session.id, f"pin-{os.getpid()}-{number}")
        else:
            manager.delete(session.id)
        manager.collect(manager.plan_gc())


def killed(engine: Engine, kept: Kept, chance: random.Random) -> None:
    """Run it in a process of its own, and kill that at some moment after its first save."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            save_and_collect_forever(engine, kept, write)
        finally:
            os._exit(1)
    os.close(write)
    with os.fdopen(read, "rb", buffering=0) as began:
        assert began.read(1) == b".", "it ended before its first save"
        time.sleep(chance.uniform(0.0, 0.5))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("kills", [25])
def test_usage_is_what_is_there_after_every_kill(engine: Engine, kept: Kept, kills: int) -> None:
    chance = random.Random(20261130)
    for _ in range(kills):
        killed(engine, kept, chance)
        store = kept.open()
        manager = SessionManager(store, engine, POLICY)
        usage = manager.usage()
        assert usage.total == store.usage() == kept.count()
        assert store.tiers()[-1].nbytes == kept.count()
        assert manager.check().clean
        there = kept.count()
        with pytest.raises(QuotaExceeded) as refused, Quota(store, there).room(1):
            pass
        assert refused.value.details["used"] == there
        with Quota(store, there + 1).room(1):
            pass
        store.close()
    time.sleep(POLICY.grace)
    store = kept.open()
    manager = SessionManager(store, engine, POLICY)
    manager.collect(manager.plan_gc())
    assert manager.usage().superseded_bytes == 0
    assert manager.usage().total == store.usage() == kept.count()
    store.close()
