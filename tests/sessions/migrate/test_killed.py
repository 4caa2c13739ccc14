"""Kill -9 at any moment of a migration: nothing is lost, nothing is there twice, and the next run ends it."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest

from sessions.manager import SessionManager
from sessions.policy import Policy
from tests.redis_server import RedisServer
from tests.sessions.migrate.killed import (
    Child,
    await_begin,
    digests,
    fill_rich,
    killed_at_random,
    looked_at,
    run,
)
from tests.sessions.migrate.places import check_clean


def journey(folder: Path, count: int, kills: int, seconds: float) -> dict[str, object]:
    """From disk to Redis and back, killed on both ways."""
    chance, told = random.Random(20261130), {}
    begun = time.monotonic()
    first, last = str(folder / "first"), f"{folder}/last/"
    fill_rich(first, count)
    with looked_at(first) as store:
        whole = digests(store)
        blobs = sum(1 for _ in store.list_blobs())
    told["filled"] = round(time.monotonic() - begun, 1)
    with RedisServer(durable=True) as server:
        for way, (source, target) in (("out", (first, server.url)), ("back", (server.url, last))):
            begun = time.monotonic()
            _, midst = killed_at_random(source, target, chance, kills, seconds)
            told[f"{way}: killed"] = f"{midst} of {kills} times in the midst"
            code, said = run(source, target, "--json")
            assert code == 0, said
            moved = json.loads(said)
            told[f"{way}: at last"] = (moved["before"], moved["num_sessions"] + moved["num_pins"])
            told[f"{way}: seconds"] = round(time.monotonic() - begun, 1)
            with looked_at(target) as store:
                assert digests(store) == whole
                check_clean(store)
                manager = SessionManager(store, None, Policy(lease=0.001, grace=0.002))
                manager.collect(manager.plan_gc())
                assert manager.check().orphans == 0
                assert sum(1 for _ in store.list_blobs()) <= blobs
                assert digests(store) == whole
            with looked_at(source) as store:
                assert digests(store) == whole
            told[f"{way}: midst"] = midst
    return told


@pytest.mark.redis
@pytest.mark.timeout(200)
def test_a_store_goes_to_redis_and_back_through_kills(tmp_path: Path) -> None:
    told = journey(tmp_path, 200, 3, 0.15)
    assert told["out: midst"] or told["back: midst"], "never killed in the midst: the test shows nothing"


@pytest.mark.redis
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_sessions_go_to_redis_and_back_through_kills(tmp_path: Path) -> None:
    told = journey(tmp_path, 10_000, 8, 4.0)
    print(json.dumps(told))
    assert told["out: midst"] >= 4
    assert told["back: midst"] >= 4


def test_ctrl_c_ends_it_cleanly_and_it_goes_on_from_there(tmp_path: Path) -> None:
    first, last = str(tmp_path / "first"), f"{tmp_path}/last/"
    fill_rich(first, 200)
    with looked_at(first) as store:
        whole = digests(store)
    child = Child("migrate", first, last, "--jobs", "1")
    await_begin(child, last)
    child.send(signal.SIGINT)
    code, said = child.end()
    assert code == 130, said
    assert "goes on from there" in said
    assert "Traceback" not in said
    with looked_at(last) as store:
        arrived = digests(store)
        check_clean(store)
    assert 0 < len(arrived) < len(whole)
    assert arrived.items() <= whole.items()
    assert run(first, last)[0] == 0
    with looked_at(last) as store:
        assert digests(store) == whole


@pytest.mark.redis
@pytest.mark.timeout(120)
def test_a_server_that_goes_in_the_midst_is_an_error_and_no_loss(tmp_path: Path) -> None:
    first = str(tmp_path / "first")
    fill_rich(first, 200)
    with looked_at(first) as store:
        whole = digests(store)
    with RedisServer(durable=True) as server:
        child = Child("migrate", first, server.url, "--jobs", "1")
        await_begin(child, server.url)
        server.kill()
        code, said = child.end()
        assert code == 41, said
        assert said.count("\n") == 1
        server.start()
        with looked_at(server.url) as store:
            arrived = digests(store)
            check_clean(store)
        assert 0 < len(arrived) < len(whole)
        assert arrived.items() <= whole.items()
        assert run(first, server.url)[0] == 0
        with looked_at(server.url) as store:
            assert digests(store) == whole
