"""The blobs of a disk store: one file each, under `<class>/<first hex digit>/<digest>`, of a sealed one
`<class>/<first hex digit>/k3-<digest>`.

Why a delete never wins over a put that renewed the age. Both change a blob's name or age only
while they hold the flock of its shard folder. A put that finds the blob renews the file's mtime
under that lock after checking that the name still leads to the file it compared; if it does not,
the put writes the blob anew. A delete reads the mtime and unlinks under one hold of the lock. So
each delete comes wholly before a put (which then writes anew) or wholly after (and sees age 0).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence

from engine.errors import BlobMissing, Corrupt
from serialization.blobs import (
    BlobClass,
    BlobId,
    BlobInfo,
    Bytes,
    StrayInfo,
    blob_class,
    blob_id,
    parse_blob_id,
    short,
    verify_blob,
)
from serialization.buffers import NEW, Buffers
from sessions.stores.base import StoreConfig, check_blob_size
from sessions.stores.folder import discard, disk_errors, locked, make_folder, opened_folder, write_temp

SHARDS = "0123456789abcdef"
_NAME = re.compile(r"(k3-)?[0-9a-f]{64}")
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def create_tree(folder: int) -> None:
    """Makes the shard folders that are missing under the open `folder`, 0700, and fsyncs what holds them."""
    made = [make_folder(cls, folder) for cls in BlobClass]
    for cls in BlobClass:
        with opened_folder(cls, folder) as fd:
            if any([make_folder(shard, fd) for shard in SHARDS]):
                os.fsync(fd)
    if any(made):
        os.fsync(folder)


def _name(blob: BlobId) -> str:
    """The name of the blob's file. Digests of the bytes are the rule, so they need no mark."""
    return blob.partition("-")[2].removeprefix("b3-")


def _blob(cls: BlobClass, name: str) -> BlobId:
    return BlobId(f"{cls}-{name}" if name.startswith("k3-") else f"{cls}-b3-{name}")


class BlobTree:
    """Blobs under the open folder `root`, which stays the caller's to close."""

    def __init__(self, root: int, config: StoreConfig) -> None:
        self._root = root
        self._config = config

    def put(self, cls: BlobClass, data: Bytes) -> BlobId:
        """See `Store.put`. A damaged file of the same name is replaced by the right bytes."""
        check_blob_size(memoryview(data).nbytes, self._config)
        blob = blob_id(cls, data)
        self.put_as(blob, data)
        return blob

    def put_as(self, blob: BlobId, data: Bytes) -> None:
        """See `Store.put_as`."""
        view = memoryview(data).cast("B")
        check_blob_size(view.nbytes, self._config)
        parse_blob_id(blob)
        with disk_errors(f"writing blob {short(blob)}"), self._shard_of(blob) as shard:
            if not self._renew(shard, _name(blob), view):
                self._write(shard, _name(blob), view)
            # Also after a renewal: whoever wrote the file may not have come to this line yet.
            os.fsync(shard)

    def _renew(self, shard: int, name: str, view: memoryview) -> bool:
        try:
            fd = os.open(name, _READ, dir_fd=shard)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP):
                return False
            raise
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size != view.nbytes:
                return False
            if _read_all(fd, NEW.take(found.st_size).data) != view:
                return False
            with locked(shard):
                there = stat_entry(shard, name)
                if there is None or (there.st_dev, there.st_ino) != (found.st_dev, found.st_ino):
                    return False
                os.utime(fd)
                return True
        finally:
            os.close(fd)

    def _write(self, shard: int, name: str, view: memoryview) -> None:
        temp = write_temp(shard, view)
        try:
            with locked(shard):
                os.utime(temp, dir_fd=shard)  # the age starts now, not when a slow fsync began
                os.rename(temp, name, src_dir_fd=shard, dst_dir_fd=shard)
        except BaseException:
            discard(temp, shard)
            raise

    def get(self, blob: BlobId, buffers: Buffers) -> memoryview:
        parse_blob_id(blob)
        with disk_errors(f"reading blob {short(blob)}"), self._shard_of(blob) as shard:
            try:
                fd = os.open(_name(blob), _READ, dir_fd=shard)
            except FileNotFoundError:
                raise BlobMissing(f"blob {short(blob)} is not in the store") from None
            except OSError as error:
                if error.errno == errno.ELOOP:
                    raise Corrupt(
                        f"blob {short(blob)} is a symbolic link, which the store never follows"
                    ) from None
                raise
            try:
                found = os.fstat(fd)
                if not stat.S_ISREG(found.st_mode):
                    raise Corrupt(f"blob {short(blob)} is not a regular file")
                check_blob_size(found.st_size, self._config)
                data = _read_all(fd, buffers.take(found.st_size).data)
            finally:
                os.close(fd)
        verify_blob(blob, data)
        return data

    def has(self, blobs: Sequence[BlobId]) -> tuple[bool, ...]:
        return tuple(self._has(parse_blob_id(blob)) for blob in blobs)

    def _has(self, blob: BlobId) -> bool:
        with disk_errors(f"looking for blob {short(blob)}"), self._shard_of(blob) as shard:
            found = stat_entry(shard, _name(blob))
            return found is not None and stat.S_ISREG(found.st_mode)

    def list_blobs(self) -> Iterator[BlobInfo]:
        for cls, _, name, found in self._entries():
            if _NAME.fullmatch(name) and stat.S_ISREG(found.st_mode):
                yield BlobInfo(_blob(cls, name), found.st_size, age_of(found))

    def list_stray(self) -> Iterator[StrayInfo]:
        for cls, shard, name, found in self._entries():
            if not (_NAME.fullmatch(name) and stat.S_ISREG(found.st_mode)):
                yield StrayInfo(f"{cls}/{shard}/{name}", found.st_size, age_of(found))

    def usage(self) -> int:
        """Sizes of all files, strays included."""
        return sum(found.st_size for *_, found in self._entries() if not stat.S_ISDIR(found.st_mode))

    def delete_blob(self, blob: BlobId, older_than: float) -> bool:
        parse_blob_id(blob)
        name = _name(blob)
        with disk_errors(f"deleting blob {short(blob)}"), self._shard_of(blob) as shard:
            return unlink_old(shard, name, older_than)

    def sweep(self, older_than: float) -> int:
        """See `Store.sweep`. Folders that are none of ours are listed but left alone."""
        num_swept = 0
        for stray in self.list_stray():
            cls, digit, name = stray.name.split("/", 2)
            if stray.age >= older_than:
                with (
                    disk_errors(f"deleting {stray.name}"),
                    self._shard(BlobClass(cls), digit) as shard,
                    contextlib.suppress(IsADirectoryError, PermissionError),
                ):
                    num_swept += unlink_old(shard, name, older_than)
        return num_swept

    @contextlib.contextmanager
    def _shard(self, cls: BlobClass, digit: str) -> Iterator[int]:
        with opened_folder(cls, self._root) as parent, opened_folder(digit, parent) as fd:
            yield fd

    def _shard_of(self, blob: BlobId) -> contextlib.AbstractContextManager[int]:
        return self._shard(blob_class(blob), blob.rpartition("-")[2][0])

    def _entries(self) -> Iterator[tuple[BlobClass, str, str, os.stat_result]]:
        for cls in BlobClass:
            for digit in SHARDS:
                with disk_errors("listing blobs"), self._shard(cls, digit) as shard:
                    found = ((name, stat_entry(shard, name)) for name in os.listdir(shard))
                    yield from ((cls, digit, name, status) for name, status in found if status is not None)


def stat_entry(folder: int, name: str) -> os.stat_result | None:
    """What lies there, a symbolic link as itself; None where nothing does (any more)."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def unlink_old(shard: int, name: str, older_than: float) -> bool:
    """Unlinks a file of an open folder if it is old enough, as one step against other holders of the lock."""
    with locked(shard):
        found = stat_entry(shard, name)
        if found is None or age_of(found) < older_than:
            return False
        os.unlink(name, dir_fd=shard)
        return True


def age_of(found: os.stat_result) -> float:
    """Seconds since the file was last put."""
    return max(0.0, time.time() - found.st_mtime)


def _read_all(fd: int, room: memoryview) -> memoryview:
    """What fills `room`, from the start; less where the file is shorter by now, which no digest accepts."""
    at = 0
    while at < len(room):
        num_read = os.readv(fd, [room[at:]])
        if not num_read:
            break
        at += num_read
    return room[:at]
