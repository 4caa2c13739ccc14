"""Workers on Redis servers that die, and whose replicas take their place: what was acknowledged stays."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sessions.stores.base import tenant_key
from tests.redis_cluster import RedisCluster, Sentinels, wait_for
from tests.sessions.service.crowd import Crowd, Heard, expected, read, talk
from tests.sessions.service.round_robin import round_robin
from tests.sessions.service.test_workers import told
from tests.sessions.service.workers import Workers

pytestmark = pytest.mark.redis

FEW = Crowd(conversations=12, turns=6)
MANY = Crowd(conversations=200, turns=10)
REFS = f"tenuto:{{{tenant_key('default')}}}:refs"


@contextmanager
def meanwhile(act: Callable[[], None]) -> Iterator[None]:
    """What `act` does, in a thread, while the block runs."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join(120)
    if failed:
        raise failed[0]


def check(crowd: Crowd, heard: Heard, stored: dict[str, list[tuple[str, str]]]) -> None:
    """Every acknowledged turn is there, once."""
    assert stored == expected(crowd, heard)
    for generations in heard.generations.values():
        assert generations == list(range(2, crowd.turns + 2)), "a turn was committed twice, or lost"


def cluster_fails_over(model: Path, folder: Path, crowd: Crowd, pause: float, times: int) -> None:
    lost: list[float] = []
    with (
        RedisCluster() as cluster,
        Workers(2, model, f"{cluster.url}?replicas=1", folder, "--deterministic") as two,
        round_robin(two.ports) as proxy,
    ):
        heard = Heard()

        def kill() -> None:
            heard.wait_for(crowd.conversations)
            for _ in range(times):
                time.sleep(pause)
                master, started = cluster.master_of(REFS), time.monotonic()
                master.kill()
                wait_for(lambda master=master: cluster.master_of(REFS) is not master)
                lost.append(round(time.monotonic() - started, 1))
                master.start()  # a replica from now on

        with meanwhile(kill):
            talk(proxy.url, crowd, heard)
        stored = read(proxy.url, crowd)
    told("cluster", heard, failovers_s=lost, reasons=dict(heard.reasons))
    assert len(lost) == times
    check(crowd, heard, stored)
    assert heard.again, "nobody was in the way of the failover: the test shows nothing"


def sentinels_fail_over(model: Path, folder: Path, crowd: Crowd, pause: float) -> None:
    with (
        Sentinels() as servers,
        Workers(2, model, f"{servers.url}?replicas=1", folder, "--deterministic") as two,
        round_robin(two.ports) as proxy,
    ):
        heard = Heard()

        def kill() -> None:
            heard.wait_for(crowd.conversations)
            time.sleep(pause)
            servers.primary.kill()
            servers.until_failed_over()
            servers.primary.start()  # a replica from now on

        with meanwhile(kill):
            talk(proxy.url, crowd, heard)
        stored = read(proxy.url, crowd)
    told("sentinel", heard, reasons=dict(heard.reasons))
    check(crowd, heard, stored)
    assert heard.again, "nobody was in the way of the failover: the test shows nothing"


def test_a_killed_master_of_a_cluster_loses_no_acknowledged_turn(tiny_path: Path, tmp_path: Path) -> None:
    cluster_fails_over(tiny_path, tmp_path, FEW, pause=0.0, times=1)


def test_a_failover_by_sentinels_loses_no_acknowledged_turn(tiny_path: Path, tmp_path: Path) -> None:
    sentinels_fail_over(tiny_path, tmp_path, FEW, pause=0.0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_conversations_on_a_cluster_whose_masters_are_killed(
    tiny_path: Path, tmp_path: Path
) -> None:
    cluster_fails_over(tiny_path, tmp_path, MANY, pause=15.0, times=3)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_conversations_and_a_failover_by_sentinels(tiny_path: Path, tmp_path: Path) -> None:
    sentinels_fail_over(tiny_path, tmp_path, MANY, pause=15.0)
