"""kill -9 at any moment, and several processes at once: nothing that was acknowledged is lost."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from serialization.blobs import BlobId
from sessions.stores.disk import DiskStore
from sessions.stores.open import open_store
from tests.redis_server import RedisServer

ROOT = Path(__file__).parents[3]

#: Puts two blobs, then moves the head to their names; says so after each turn.
SAVES = """
import os, sys
from serialization.blobs import BlobClass
from sessions.stores.open import open_store

store = open_store(sys.argv[1])
head = store.read("head")
turn = int(store.read("turn") or b"-1")
while True:
    turn += 1
    blobs = [store.put(BlobClass.ROWS, os.urandom(size)) for size in (3000, 40000)]
    new = " ".join(blobs).encode()
    assert store.swap("head", head, new)
    assert store.swap("turn", store.read("turn"), b"%d" % turn, guard=("head", new))
    head = new
    print(turn, flush=True)
"""

COUNTS = """
import sys
from sessions.stores.open import open_store

store = open_store(sys.argv[1])
done = 0
while done < 200:
    value = store.read("count")
    done += store.swap("count", value, b"%d" % (int(value or b"0") + 1))
store.close()
"""


def python(script: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", script, *arguments], cwd=ROOT, stdout=subprocess.PIPE)


def test_after_kill_9_the_head_is_whole_and_no_turn_is_lost(tmp_path: Path) -> None:
    moments = random.Random(11)
    num_strays = 0
    for _ in range(20):
        with python(SAVES, str(tmp_path)) as saver:
            assert saver.stdout is not None
            acknowledged = int(saver.stdout.readline())
            time.sleep(moments.uniform(0.0, 0.02))
            saver.kill()
            acknowledged = max([acknowledged, *(int(line) for line in saver.stdout.read().split())])
        store = DiskStore(tmp_path)
        head, turn = store.read_many(["head", "turn"])
        assert head is not None
        assert int(turn or b"-1") >= acknowledged
        blobs = [BlobId(name) for name in head.decode().split()]
        assert [len(store.get(blob)) for blob in blobs] == [3000, 40000]
        for info in store.list_blobs():
            assert len(store.get(info.blob)) == info.nbytes
        assert store.check_index() == ()
        num_strays += store.sweep(0)
        assert list(store.list_stray()) == []
        store.close()


def count_in_two_processes(url: str) -> bytes | None:
    counters = [python(COUNTS, url) for _ in range(2)]
    for counter in counters:
        counter.communicate(timeout=60)
        assert counter.returncode == 0
    store = open_store(url)
    total = store.read("count")
    assert store.check_index() == ()
    store.close()
    return total


def test_two_processes_lose_no_update_on_disk(tmp_path: Path) -> None:
    assert count_in_two_processes(str(tmp_path)) == b"400"


@pytest.mark.redis
def test_two_processes_lose_no_update_on_redis(redis_server: RedisServer) -> None:
    client = redis_server.client()
    client.flushall()
    client.close()
    assert count_in_two_processes(redis_server.url) == b"400"
