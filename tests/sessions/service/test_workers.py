"""Several processes on one Redis: every turn by whichever comes next, none lost, none said twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.redis_server import RedisServer
from tests.sessions.service.crowd import Crowd, Heard, expected, read, talk
from tests.sessions.service.round_robin import round_robin
from tests.sessions.service.workers import Killer, Workers

pytestmark = pytest.mark.redis

FEW = Crowd(conversations=12, turns=4)
MANY = Crowd(conversations=200, turns=10)


def told(what: str, heard: Heard, **more: object) -> None:
    """A line of figures, for who runs this by `make workers` (pytest -s)."""
    again = dict(heard.again)
    slow = round(heard.slowest(), 2)
    print(json.dumps({"what": what, "turns": heard.turns, "again": again, "slowest_s": slow, **more}))


def by_one(model: Path, folder: Path, crowd: Crowd) -> Heard:
    """What a single worker says, with the same seeds."""
    folder.mkdir()
    with RedisServer() as server, Workers(1, model, server.url, folder, "--deterministic") as one:
        return talk(f"http://127.0.0.1:{one[0].port}", crowd)


def by_two(model: Path, folder: Path, crowd: Crowd) -> None:
    with (
        RedisServer() as server,
        Workers(2, model, server.url, folder, "--deterministic") as two,
        round_robin(two.ports) as proxy,
    ):
        heard = talk(proxy.url, crowd)
        assert read(proxy.url, crowd) == expected(crowd, heard)
        assert sum(heard.again.values()) == 0
        assert min(proxy.given.values()) > 0.4 * sum(proxy.given.values())
    told("two workers", heard, reasons=dict(heard.reasons))
    alone = by_one(model, folder / "alone", crowd)
    told("one worker", alone)
    assert heard.replies == alone.replies


def killed(
    model: Path, folder: Path, crowd: Crowd, pause: float, least: int, most: int | None = None
) -> None:
    with (
        RedisServer() as server,
        Workers(2, model, server.url, folder, "--deterministic") as two,
        round_robin(two.ports) as proxy,
    ):
        heard = Heard()
        with Killer(two, heard, crowd, pause, most) as killer:
            talk(proxy.url, crowd, heard)
        stored = read(proxy.url, crowd)
    told("two workers, killed", heard, kills=killer.kills, reasons=dict(heard.reasons))
    assert killer.kills >= least, "nobody was killed in time: the test shows nothing"
    assert stored == expected(crowd, heard)
    for generations in heard.generations.values():
        assert generations == list(range(2, crowd.turns + 2)), "a turn was committed twice, or lost"
    alone = by_one(model, folder / "alone", crowd)
    assert heard.replies == alone.replies


def test_whoever_takes_a_turn_says_what_a_single_one_would(tiny_path: Path, tmp_path: Path) -> None:
    by_two(tiny_path, tmp_path, FEW)


def test_a_killed_worker_loses_no_turn_and_none_is_said_twice(tiny_path: Path, tmp_path: Path) -> None:
    killed(tiny_path, tmp_path, FEW, pause=0.0, least=1, most=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_conversations_of_ten_turns(tiny_path: Path, tmp_path: Path) -> None:
    by_two(tiny_path, tmp_path, MANY)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_conversations_while_a_worker_is_killed_every_few_seconds(
    tiny_path: Path, tmp_path: Path
) -> None:
    killed(tiny_path, tmp_path, MANY, pause=4.0, least=5)
