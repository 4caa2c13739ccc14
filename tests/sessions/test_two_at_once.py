"""Many processes on one store: leases keep writers apart, and gc beside them takes nothing that is needed."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import LeaseHeld
from engine.runner import Engine
from sessions.manager import SessionManager
from sessions.policy import Policy
from sessions.restore import Reason
from sessions.stores.open import open_store
from tests.redis_server import RedisServer

POLICY = Policy(lease=2.0, grace=2.5)
PROCESSES, SESSIONS = 8, 50
SHARED = "the instructions that every session begins with, word for word. " * 9


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a process of its own; its exit status is 0 if it came through."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)
    raise AssertionError


def write_sessions(engine: Engine, url: str, seed: int, report: Path) -> None:
    """Create, save, resume, rewind, fork and delete; tell at the end what must be there."""
    manager = SessionManager(open_store(url), engine, POLICY)
    chance = random.Random(seed)
    expected: dict[str, int] = {}
    for number in range(SESSIONS):
        seq = engine.create()
        text = SHARED + f"session {seed}-{number} " * chance.randint(1, 20)
        engine.feed(seq, engine.tokenizer.encode(text))
        session = manager.create(f"s{seed}-{number}")
        manager.save(session, seq, ())
        if chance.random() < 0.5:
            cut = engine.length(seq) - chance.randint(1, 200)
            engine.rewind(seq, cut)
            session.cut(cut)
        engine.feed(seq, engine.tokenizer.encode("and more " * chance.randint(1, 40)))
        manager.save(session, seq, ())
        expected[session.id] = engine.length(seq)
        engine.close(seq)
        session.close()
        fate = chance.random()
        if fate < 0.2:
            manager.delete(session.id)
            del expected[session.id]
        elif fate < 0.4:
            expected[manager.fork(session.id).id] = expected[session.id]
        elif fate < 0.6:
            opened = manager.open(session.id)
            seq, result = manager.resume(opened)
            assert result.reason is Reason.EXACT, result
            opened.close()
            engine.close(seq)
    report.write_text(json.dumps(expected))


def collect_until_stopped(url: str) -> None:
    manager = SessionManager(open_store(url), policy=POLICY)
    while True:
        manager.collect(manager.plan_gc())
        time.sleep(0.05)


def hammer(engine: Engine, url: str, tmp_path: Path) -> None:
    reports = [tmp_path / f"{seed}.json" for seed in range(PROCESSES)]
    writers = [
        in_child(lambda seed=seed, report=report: write_sessions(engine, url, seed, report))  # type: ignore[misc]
        for seed, report in enumerate(reports)
    ]
    collector = in_child(lambda: collect_until_stopped(url))
    try:
        statuses = [os.waitpid(pid, 0)[1] for pid in writers]
        assert os.waitpid(collector, os.WNOHANG) == (0, 0), "gc ended with an error"
    finally:
        os.kill(collector, signal.SIGKILL)
        os.waitpid(collector, 0)
    assert statuses == [0] * PROCESSES
    expected: dict[str, int] = {}
    for report in reports:
        expected |= json.loads(report.read_text())
    manager = SessionManager(open_store(url), engine, POLICY)
    checked = manager.check()
    assert checked.clean, checked.problems[:5]
    assert {info.id: info.length for info in manager.list()} == expected
    for session in random.Random(0).sample(sorted(expected), 20):
        opened = manager.open(session)
        seq, result = manager.resume(opened)
        opened.close()
        engine.close(seq)
        assert (result.reason, result.restored) == (Reason.EXACT, expected[session])
    time.sleep(POLICY.grace)
    manager.collect(manager.plan_gc())
    after = manager.check()
    assert after.clean
    assert after.orphans == 0


@pytest.mark.timeout(400)
def test_eight_processes_hammer_one_disk_store_beside_gc(engine: Engine, tmp_path: Path) -> None:
    hammer(engine, str(tmp_path / "store"), tmp_path)


@pytest.mark.redis
@pytest.mark.timeout(400)
def test_eight_processes_hammer_one_redis_store_beside_gc(
    engine: Engine, redis_server: RedisServer, tmp_path: Path
) -> None:
    redis_server.client().flushall()
    hammer(engine, redis_server.url, tmp_path)


def test_a_second_process_is_told_who_holds_a_session_and_until_when(engine: Engine, tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    manager = SessionManager(open_store(url), engine, POLICY)
    seq = engine.create()
    engine.feed(seq, engine.tokenizer.encode("mine"))
    session = manager.create()
    manager.save(session, seq, ())
    session.close()
    ready = tmp_path / "ready"

    def hold() -> None:
        other = SessionManager(open_store(url), engine, POLICY)
        other.open(session.id)
        ready.touch()
        time.sleep(60)

    holder = in_child(hold)
    while not ready.exists():
        time.sleep(0.01)
    time.sleep(POLICY.lease * 1.5)  # it is renewed for as long as its holder lives
    with pytest.raises(LeaseHeld, match=f"pid {holder} ") as caught:
        manager.open(session.id)
    assert caught.value.details["until"] > time.time() - 1  # type: ignore[operator]
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    time.sleep(POLICY.lease * 1.2)  # and ends by itself after that
    manager.open(session.id).close()
