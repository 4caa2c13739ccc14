"""The disk store keeps every law of stores, and its files are what its docstring says."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import Corrupt, IndexDamaged, StoreUnavailable
from serialization.blobs import BlobClass, blob_id
from sessions.stores.disk import DiskStore
from tests.sessions.stores.benches import DiskBench
from tests.sessions.stores.contract import StoreContract

ROWS = BlobClass.ROWS


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[DiskBench]:
    bench = DiskBench(tmp_path / "store")
    yield bench
    bench.close()


class TestDiskStore(StoreContract):
    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[DiskBench]:
        bench = DiskBench(tmp_path / "store")
        yield bench
        bench.close()


def test_only_the_owner_can_read_any_of_it(bench: DiskBench) -> None:
    store = bench.open()
    store.put(ROWS, b"secret")
    store.swap("s", None, b"secret")
    paths = [bench.root, *bench.root.rglob("*")]
    modes = {(path.is_dir(), stat.S_IMODE(path.lstat().st_mode)) for path in paths}
    assert modes == {(True, 0o700), (False, 0o600)}


def test_names_from_outside_are_in_no_path(bench: DiskBench) -> None:
    bench.open("a-tenant").swap("a-session/name", None, b"x")
    assert not [path for path in bench.root.rglob("*") if "a-tenant" in path.name or "a-session" in path.name]


def test_usage_is_the_sum_of_all_files(bench: DiskBench) -> None:
    store = bench.open()
    store.put(ROWS, bytes(3000))
    store.swap("s", None, b"x")
    store.rebuild({})
    files = [path for path in bench.folder.rglob("*") if path.is_file()]
    assert any(path.name.startswith("set-aside-") for path in files)
    assert store.usage() == sum(path.stat().st_size for path in files)


def test_a_blob_that_is_a_symbolic_link_is_refused_and_put_replaces_it(
    bench: DiskBench, tmp_path: Path
) -> None:
    store = bench.open()
    blob = store.put(ROWS, b"content")
    outside = tmp_path / "outside"
    outside.write_bytes(b"content")
    bench.file(blob).unlink()
    bench.file(blob).symlink_to(outside)
    with pytest.raises(Corrupt, match="symbolic link"):
        store.get(blob)
    assert store.has([blob]) == (False,)
    assert list(store.list_blobs()) == []
    assert [stray.name.endswith(blob[-64:]) for stray in store.list_stray()] == [True]
    store.put(ROWS, b"content")
    assert not bench.file(blob).is_symlink()
    assert store.get(blob) == b"content"


def test_a_blob_that_is_no_file_is_refused(bench: DiskBench) -> None:
    store = bench.open()
    blob = store.put(ROWS, b"content")
    bench.file(blob).unlink()
    os.mkfifo(bench.file(blob))
    with pytest.raises(Corrupt, match="not a regular file"):
        store.get(blob)


@pytest.mark.parametrize("level", ["shard", "class", "blobs", "tenant"])
def test_a_folder_that_is_a_symbolic_link_is_never_followed(bench: DiskBench, level: str) -> None:
    store = bench.open()
    blob = store.put(ROWS, b"content")
    file = bench.file(blob)
    folder = {
        "shard": file.parent,
        "class": file.parents[1],
        "blobs": file.parents[2],
        "tenant": file.parents[3],
    }[level]
    store.close()
    moved = bench.root / "moved"
    folder.rename(moved)
    folder.symlink_to(moved)
    with pytest.raises(StoreUnavailable, match="symbolic link"):
        bench.open().get(blob)


def test_an_index_that_is_a_symbolic_link_is_refused_and_rebuilt(bench: DiskBench, tmp_path: Path) -> None:
    store = bench.open()
    store.swap("s", None, b"x")
    store.close()
    bench.index.rename(tmp_path / "elsewhere")
    bench.index.symlink_to(tmp_path / "elsewhere")
    again = bench.open()
    with pytest.raises(IndexDamaged, match="symbolic link"):
        again.read("s")
    again.rebuild({"s": b"x"})
    assert again.read("s") == b"x"
    assert not bench.index.is_symlink()


def test_the_root_itself_may_be_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    store = DiskStore(tmp_path / "link")
    blob = store.put(ROWS, b"x")
    store.close()
    again = DiskStore(tmp_path / "real")
    assert again.get(blob) == b"x"
    again.close()


def test_strays_are_listed_and_swept_when_old(bench: DiskBench) -> None:
    store = bench.open()
    blob = store.put(ROWS, b"whole")
    left = [
        bench.file(blob).parent / ".new-1-abc",
        bench.folder / ".new-1-def",
        bench.file(blob).parent / "junk",
    ]
    for path in left:
        path.write_bytes(b"half")
    assert sorted(stray.nbytes for stray in store.list_stray()) == [4, 4, 4]
    assert store.sweep(60) == 0
    assert store.sweep(0) == 3
    assert list(store.list_stray()) == []
    assert store.get(blob) == b"whole"


def test_a_store_that_was_closed_says_so(bench: DiskBench) -> None:
    store = bench.open()
    store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        store.get(blob_id(ROWS, b""))


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreUnavailable):
        DiskStore(tmp_path / "file")


def test_a_store_whose_making_was_cut_off_is_made_on_the_next_open(tmp_path: Path) -> None:
    bench = DiskBench(tmp_path / "store")
    bench.open().close()
    for shard in (bench.folder / "blobs").rglob("[4-9a-f]"):
        shard.rmdir()
    (bench.folder / "blobs").rename(bench.folder / ".new-blobs")
    store = bench.open()
    assert store.get(store.put(ROWS, b"x")) == b"x"
    assert store.swap("s", None, b"x")
    assert list(store.list_stray()) == []
    bench.close()


def test_empty_folders_that_a_copy_left_behind_are_made_again(tmp_path: Path) -> None:
    with contextlib.closing(DiskStore(tmp_path / "a")) as store:
        kept = store.put(BlobClass.ROWS, b"rows")
    for folder in sorted((tmp_path / "a").rglob("*"), reverse=True):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    with contextlib.closing(DiskStore(tmp_path / "a")) as store:
        assert [info.blob for info in store.list_blobs()] == [kept]
        for i in range(64):
            store.put(BlobClass.MANIFEST, b"%d" % i)
