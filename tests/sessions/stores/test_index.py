"""A damaged index is found, never believed, set aside and rebuilt; a newer one is refused."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import IndexDamaged, StoreUnavailable, UnknownVersion
from serialization.blobs import BlobClass
from sessions.stores.base import StoreConfig, seal
from tests.faults import flip
from tests.sessions.stores.benches import DiskBench

REFS = {f"session/{number:04d}": bytes([number]) * 40 for number in range(120)}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed store with several pages of refs and one blob."""
    bench = DiskBench(tmp_path_factory.mktemp("sound"))
    store = bench.open()
    store.put(BlobClass.MANIFEST, b"kept")
    for name, value in REFS.items():
        store.swap(name, None, value)
    bench.close()
    return bench.root


@pytest.fixture
def bench(sound: Path, tmp_path: Path) -> Iterator[DiskBench]:
    bench = DiskBench(tmp_path / "copy")
    shutil.copytree(sound, bench.root)
    yield bench
    bench.close()


def harmless(bench: DiskBench) -> bool:
    """Whether a fresh handle finds all refs as they were and can still write."""
    store = bench.open()
    found = dict(store.list_refs(""))
    each = store.read_many(list(REFS))
    return found == REFS and each == tuple(REFS.values()) and store.swap("one/more", None, b"x")


def test_a_flipped_bit_anywhere_is_found_or_harmless(bench: DiskBench) -> None:
    """Every byte of the header, all bits of its versions, and many others. Free space may change unseen,
    no value may."""
    original = bench.index.read_bytes()
    chosen = random.Random(7)
    bits = [*range(16 * 8, 24 * 8), *(byte * 8 + chosen.randrange(8) for byte in range(100))]
    bits += [chosen.randrange(100 * 8, len(original) * 8) for _ in range(150)]
    num_found = 0
    for bit in bits:
        for path in bench.folder.glob("*index.sqlite*"):
            path.unlink()
        bench.index.write_bytes(flip(original, bit))
        problems = bench.open().check_index()
        assert all("\n" not in line and line.isprintable() for line in problems)
        if problems:
            num_found += 1
            store = bench.open()
            assert [store.get(info.blob) for info in store.list_blobs()] == [b"kept"]
            store.rebuild(REFS)
            assert store.check_index() == ()
        assert harmless(bench), f"bit {bit} of byte {bit // 8}"
        bench.close()
        bench._opened.clear()
    assert num_found > 80, num_found


@pytest.mark.parametrize("damage", ["empty", "gone", "folder", "text", "half"])
def test_a_ruined_index_is_found_and_rebuilt(bench: DiskBench, damage: str) -> None:
    original = bench.index.read_bytes()
    bench.index.unlink()
    if damage == "folder":
        bench.index.mkdir()
    elif damage != "gone":
        bench.index.write_bytes(
            {"empty": b"", "text": b"hello\n" * 999, "half": original[: len(original) // 2]}[damage]
        )
    store = bench.open()
    for act in (lambda: list(store.list_refs("")), lambda: store.swap("s", None, b"x")):
        with pytest.raises(IndexDamaged):
            act()
    assert len(store.check_index()) >= 1
    assert [store.get(info.blob) for info in store.list_blobs()] == [b"kept"]
    store.rebuild(REFS)
    assert harmless(bench)


def test_the_damaged_index_is_set_aside_whole(bench: DiskBench) -> None:
    bench.index.write_bytes(b"damaged beyond repair")
    bench.open().rebuild(REFS)
    assert [path.read_bytes() for path in bench.folder.glob("set-aside-*")] == [b"damaged beyond repair"]


def test_a_log_left_without_its_index_is_never_replayed_into_the_new_one(bench: DiskBench) -> None:
    connection = sqlite3.connect(bench.index)
    connection.execute("INSERT INTO refs VALUES ('late', ?)", (seal("late", b"x"),))
    connection.commit()
    log = bench.folder / "index.sqlite-wal"
    kept = log.read_bytes()
    connection.close()
    bench.index.unlink()  # as a crash in the middle of a rebuild leaves it
    log.write_bytes(kept)
    store = bench.open()
    store.rebuild(REFS)
    assert harmless(bench)
    assert [path.read_bytes() for path in bench.folder.glob("set-aside-*-wal")] == [kept]


def test_a_newer_version_is_refused_by_name(bench: DiskBench) -> None:
    connection = sqlite3.connect(bench.index)
    connection.execute("UPDATE about SET sealed = ?", (seal("version", b"2"),))
    connection.execute("PRAGMA user_version = 2")
    connection.commit()
    connection.close()
    with pytest.raises(UnknownVersion, match="version 2"):
        bench.open().read("s")


@pytest.mark.parametrize("claimed", [0, 2, 1 << 24])
def test_a_version_that_only_one_copy_claims_is_damage(bench: DiskBench, claimed: int) -> None:
    connection = sqlite3.connect(bench.index)
    connection.execute(f"PRAGMA user_version = {claimed}")
    connection.close()
    with pytest.raises(IndexDamaged, match="header"):
        bench.open().read("s")


def test_handles_in_use_follow_a_rebuild_by_another(bench: DiskBench) -> None:
    users = [bench.open() for _ in range(3)]
    for user in users:
        user.read("s")
    bench.open().rebuild({"s": b"1"})
    for number, user in enumerate(users):
        assert user.swap("s", b"%d" % (number + 1), b"%d" % (number + 2))
    assert users[0].read("s") == b"4"
    assert users[0].check_index() == ()


def test_no_swap_is_lost_beside_rebuilds(bench: DiskBench) -> None:
    """A swap that returned True before a rebuild began is in what the rebuild read, here under one ref."""
    store, rebuilder = bench.open(), bench.open()
    store.swap("count", None, b"0")
    stop = threading.Event()
    errors: list[BaseException] = []

    def count() -> None:
        try:
            while not stop.is_set():
                value = store.read("other")
                assert (
                    store.swap("other", value, b"%d" % (int(value or b"0") + 1))
                    or store.read("other") is None
                )
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=count)
    thread.start()
    for number in range(20):
        rebuilder.rebuild({"count": b"%d" % number})
        assert rebuilder.read("count") == store.read("count") == b"%d" % number
    stop.set()
    thread.join()
    assert errors == []
    assert store.check_index() == ()


def test_a_busy_index_is_unavailable_and_not_damaged(bench: DiskBench) -> None:
    store = bench.open(config=StoreConfig(busy_timeout=0.1))
    blocker = sqlite3.connect(bench.index, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match="busy"):
        store.swap("s", None, b"x")
    assert store.read("session/0001") == REFS["session/0001"]
    blocker.execute("ROLLBACK")
    blocker.close()
    assert store.swap("s", None, b"x")


def test_a_child_of_a_fork_opens_its_own_connection(bench: DiskBench) -> None:
    store = bench.open()
    store.read("s")
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, b"1" if store.swap("s", None, b"child") else b"0")
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(writer)
    assert os.read(reader, 1) == b"1"
    os.close(reader)
    assert store.swap("s", b"child", b"parent")
    assert store.check_index() == ()
