"""Faults on demand: the n-th I/O call of this process, or the n-th call of a store, fails.

Used to run one operation once for every n, as SQLite's own tests do.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from unittest import mock

from engine.errors import StoreUnavailable
from serialization.blobs import BlobClass, BlobId, BlobInfo, Bytes, Store, StrayInfo, TierInfo
from serialization.buffers import NEW, Buffers

T = TypeVar("T")

#: Of `os`. `close` is left alone: its failure would leak the descriptor that the test then misses.
IO_CALLS = (
    *("open", "write", "read", "readv", "fsync", "rename", "mkdir", "unlink", "utime"),
    *("stat", "lstat", "fstat", "listdir"),
)

_SQLITE_CODES = {errno.ENOSPC: sqlite3.SQLITE_FULL}


class IoFaults:
    """Counts the I/O calls of the thread that made it; the armed one raises instead of acting.

    Calls are those of `IO_CALLS`, `fcntl.flock`, and each statement of a SQLite connection that
    was opened while this was installed.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self.fired: str | None = None
        self._nth: int | None = None
        self._code = errno.EIO
        self._thread = threading.get_ident()

    def arm(self, nth: int | None, code: int = errno.EIO) -> None:
        """The `nth` call from now on (0 is the next) fails with `code`; None counts only."""
        self.num_calls, self.fired, self._nth, self._code = 0, None, nth, code

    def disarm(self) -> None:
        self._nth = None

    @contextlib.contextmanager
    def installed(self) -> Iterator[IoFaults]:
        with contextlib.ExitStack() as stack:
            for name in IO_CALLS:
                stack.enter_context(
                    mock.patch.object(os, name, self._wrapped(f"os.{name}", getattr(os, name)))
                )
            stack.enter_context(mock.patch.object(fcntl, "flock", self._wrapped("flock", fcntl.flock)))
            stack.enter_context(mock.patch.object(sqlite3, "connect", self._connecting(sqlite3.connect)))
            yield self

    def _due(self, name: str) -> bool:
        if threading.get_ident() != self._thread:
            return False
        due = self.num_calls == self._nth
        self.num_calls += 1
        if due:
            self.fired = name
        return due

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._due(name):
                raise OSError(self._code, os.strerror(self._code))
            return real(*args, **kwargs)

        return call

    def _connecting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        faults = self

        class Connection(sqlite3.Connection):
            def execute(self, *args: Any) -> sqlite3.Cursor:
                faults._statement(str(args[0]))
                return super().execute(*args)

            def executemany(self, *args: Any) -> sqlite3.Cursor:
                faults._statement(str(args[0]))
                return super().executemany(*args)

        def connect(*args: Any, **kwargs: Any) -> Any:
            return real(*args, factory=Connection, **kwargs)

        return connect

    def _statement(self, statement: str) -> None:
        if self._due(f"sqlite: {statement.split()[0]}"):
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = _SQLITE_CODES.get(self._code, sqlite3.SQLITE_IOERR)
            raise error


class FaultyStore:
    """A store whose calls fail as planned: 'r' before it acts, 'R' after it acted (the answer is lost).

    `plan` is read one letter per call, '.' being a call that works; all is well after its end. Calls
    of `usage`, `tiers`, `check_index`, `rebuild`, `list_stray`, `sweep` and `close` are not counted.
    """

    def __init__(self, store: Store, plan: str = "") -> None:
        self.store = store
        self.plan = plan
        self.num_calls = 0

    def put(self, cls: BlobClass, data: Bytes) -> BlobId:
        return self._call(self.store.put, cls, data)

    def put_as(self, blob: BlobId, data: Bytes) -> None:
        self._call(self.store.put_as, blob, data)

    def get(self, blob: BlobId, buffers: Buffers = NEW) -> Bytes:
        return self._call(self.store.get, blob, buffers)

    def get_anew(self, blob: BlobId) -> bytes:
        return self._call(self.store.get_anew, blob)

    def has(self, blobs: Sequence[BlobId]) -> tuple[bool, ...]:
        return self._call(self.store.has, blobs)

    def refresh(self, blobs: Sequence[BlobId]) -> None:
        self._call(self.store.refresh, blobs)

    def list_blobs(self) -> Iterator[BlobInfo]:
        return self._call(self.store.list_blobs)

    def delete_blob(self, blob: BlobId, older_than: float) -> bool:
        return self._call(self.store.delete_blob, blob, older_than)

    def list_stray(self) -> Iterator[StrayInfo]:
        return self.store.list_stray()

    def sweep(self, older_than: float) -> int:
        return self.store.sweep(older_than)

    def read(self, name: str) -> bytes | None:
        return self._call(self.store.read, name)

    def read_many(self, names: Sequence[str]) -> tuple[bytes | None, ...]:
        return self._call(self.store.read_many, names)

    def list_refs(self, prefix: str) -> Iterator[tuple[str, bytes]]:
        return self._call(self.store.list_refs, prefix)

    def last_refs(self, prefix: str, before: str | None, most: int) -> tuple[tuple[str, bytes], ...]:
        return self._call(self.store.last_refs, prefix, before, most)

    def swap(
        self, name: str, old: bytes | None, new: bytes | None, guard: tuple[str, bytes] | None = None
    ) -> bool:
        return self._call(self.store.swap, name, old, new, guard)

    def hint(self, refs: Mapping[str, bytes]) -> None:
        self._call(self.store.hint, refs)

    @property
    def rows_expire(self) -> bool:
        return self.store.rows_expire

    def since(self) -> float | None:
        return self._call(self.store.since)

    def now(self) -> float:
        return self._call(self.store.now)

    def usage(self) -> int:
        return self.store.usage()

    def tiers(self) -> tuple[TierInfo, ...]:
        return self.store.tiers()

    def check_index(self) -> tuple[str, ...]:
        return self.store.check_index()

    def rebuild(self, refs: Mapping[str, bytes]) -> None:
        self.store.rebuild(refs)

    def scoped(self, session: str) -> FaultyStore:
        return self

    def wipe(self) -> None:
        self.store.wipe()

    def close(self) -> None:
        self.store.close()

    def _call(self, act: Callable[..., T], *args: Any) -> T:
        letter = self.plan[self.num_calls : self.num_calls + 1]
        self.num_calls += 1
        if letter == "r":
            raise StoreUnavailable(f"planned fault of call {self.num_calls}")
        answer = act(*args)
        if letter == "R":
            raise StoreUnavailable(f"planned loss of the answer to call {self.num_calls}")
        return answer


def flip(data: bytes, bit: int) -> bytes:
    """`data` with one bit changed: overwriting would do nothing one time in 256."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << (bit % 8)
    return bytes(changed)
