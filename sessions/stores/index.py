"""The refs of a disk store: one SQLite file, which can always be rebuilt from the manifests.

Each process holds a shared flock on the store's folder while it uses the file, and reopens it when
the name leads to another file by now. `rebuild` holds the exclusive one, so nobody writes to an
index that was set aside. Every value is sealed (`base.seal`), and the version is kept twice, so
that a flipped bit is told from a newer format.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from engine.errors import IndexDamaged, StoreError, StoreFull, StoreUnavailable, UnknownVersion
from sessions.stores.base import printable, seal, unseal, unseal_row
from sessions.stores.folder import disk_errors, locked, opened_folder, share_locked, sync_folder

INDEX = "index.sqlite"
SET_ASIDE = "set-aside-"
VERSION = 1
#: Refs that are read at once where all are listed.
_PAGE = 500
_COMPANIONS = ("-wal", "-shm")
_DAMAGED = frozenset(
    {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_FORMAT}
)
_SCHEMA = (
    "CREATE TABLE refs (name TEXT PRIMARY KEY NOT NULL, sealed BLOB NOT NULL) WITHOUT ROWID",
    "CREATE TABLE about (name TEXT PRIMARY KEY NOT NULL, sealed BLOB NOT NULL) WITHOUT ROWID",
)
#: Connections inherited over a fork: SQLite forbids their use and their closing in the child.
_ABANDONED: list[sqlite3.Connection] = []


def index_error(error: sqlite3.Error, writable: bool) -> StoreError:
    """What an error of SQLite means, in one line. `writable`: the system lets us write the file."""
    # Set by SQLite, absent from the errors of the sqlite3 module itself (text that is no UTF-8, …).
    code = error.__dict__.get("sqlite_errorcode", sqlite3.SQLITE_FORMAT) & 0xFF
    if code in _DAMAGED or (code == sqlite3.SQLITE_READONLY and writable):
        return IndexDamaged(f"the index is damaged ({printable(str(error))}); check --repair rebuilds it")
    if code == sqlite3.SQLITE_FULL:
        return StoreFull("the index cannot grow: no space left on the device")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreUnavailable("other processes kept the index busy for too long")
    return StoreUnavailable(f"the index cannot be used: {printable(str(error))}")


class RefIndex:
    """Refs in `folder`/index.sqlite. Safe from many threads (one at a time) and processes."""

    def __init__(self, folder: Path, busy_timeout: float) -> None:
        self._folder = folder
        self._path = folder / INDEX
        self._busy_timeout = busy_timeout
        self._mutex = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._opened: tuple[int, int, int] | None = None  # process, device and inode of the open file

    def create(self) -> None:
        """Makes an empty index if there is none. The caller holds the folder's exclusive lock."""
        if not os.path.lexists(self._path):
            self._install({})

    def read_many(self, names: Sequence[str]) -> tuple[bytes | None, ...]:
        with self._using() as connection:
            return tuple(_read(connection, name) for name in names)

    def list_refs(self, prefix: str) -> Iterator[tuple[str, bytes]]:
        """Sorted by name, page by page. DEL sorts after every byte that a name may have."""
        after, end = "", prefix + "\x7f"
        while True:
            with self._using() as connection:
                rows = connection.execute(
                    "SELECT name, sealed FROM refs WHERE name >= ? AND name < ? AND name > ?"
                    " ORDER BY name LIMIT ?",
                    (prefix, end, after, _PAGE),
                ).fetchall()
            for row in rows:
                name, value = unseal_row(*row)
                if name <= after:
                    raise IndexDamaged("the index is damaged (its order); check --repair rebuilds it")
                yield name, value
                after = name
            if len(rows) < _PAGE:
                return

    def last_refs(self, prefix: str, before: str | None, most: int) -> tuple[tuple[str, bytes], ...]:
        end = prefix + "\x7f" if before is None else min(before, prefix + "\x7f")
        with self._using() as connection:
            rows = connection.execute(
                "SELECT name, sealed FROM refs WHERE name >= ? AND name < ? ORDER BY name DESC LIMIT ?",
                (prefix, end, most),
            ).fetchall()
        return tuple(unseal_row(name, sealed) for name, sealed in rows)

    def swap(self, name: str, old: bytes | None, new: bytes | None, guard: tuple[str, bytes] | None) -> bool:
        with self._using() as connection, _transaction(connection):
            if _read(connection, name) != old or (
                guard is not None and _read(connection, guard[0]) != guard[1]
            ):
                return False
            if new is not None:
                connection.execute("INSERT OR REPLACE INTO refs VALUES (?, ?)", (name, seal(name, new)))
            elif old is not None:
                connection.execute("DELETE FROM refs WHERE name = ?", (name,))
            return True

    def hint(self, refs: Mapping[str, bytes]) -> None:
        """Sets `refs` in one transaction without waiting for the device: the next swap's fsync covers it."""
        with self._using() as connection:
            connection.execute("PRAGMA synchronous = NORMAL")
            try:
                with _transaction(connection):
                    rows = ((name, seal(name, value)) for name, value in refs.items())
                    connection.executemany("INSERT OR REPLACE INTO refs VALUES (?, ?)", rows)
            finally:
                connection.execute("PRAGMA synchronous = FULL")

    def check(self) -> tuple[str, ...]:
        """Problems, a line each. Raises StoreUnavailable where the index cannot even be tried."""
        try:
            with self._using() as connection:
                found = [row[0] for row in connection.execute("PRAGMA integrity_check(20)")]
                if os.access(self._path, os.W_OK):  # a damaged header may forbid writing, and only that
                    connection.execute("BEGIN IMMEDIATE")
                    connection.execute("UPDATE about SET sealed = sealed")
                    connection.execute("ROLLBACK")
                damaged = list(_damaged(connection.execute("SELECT name, sealed FROM refs")))
        except IndexDamaged as error:
            return (str(error),)
        # Before SQLite 3.42 a line of integrity_check may hold any bytes of the damaged file.
        return (*(f"index: {printable(line)}" for line in found if line != b"ok"), *damaged)

    def rebuild(self, refs: Mapping[str, bytes]) -> None:
        """Sets the index aside under a new name and makes one that holds `refs`."""
        with self._mutex, disk_errors("rebuilding the index"), opened_folder(self._folder) as fd, locked(fd):
            self._drop()
            self._install(refs)

    def close(self) -> None:
        with self._mutex:
            self._drop()

    @contextlib.contextmanager
    def _using(self) -> Iterator[sqlite3.Connection]:
        with (
            self._mutex,
            disk_errors("opening the index"),
            opened_folder(self._folder) as fd,
            share_locked(fd),
        ):
            try:
                yield self._current()
            except sqlite3.Error as error:
                self._drop()
                raise index_error(error, os.access(self._path, os.W_OK)) from error
            except UnicodeDecodeError as error:  # SQLite's own message quoted damaged bytes
                self._drop()
                raise IndexDamaged("the index is damaged (its schema); check --repair rebuilds it") from error

    def _current(self) -> sqlite3.Connection:
        try:
            found = os.lstat(self._path)
        except FileNotFoundError:
            raise IndexDamaged(
                "the index is gone, though its store is here; check --repair rebuilds it"
            ) from None
        if not stat.S_ISREG(found.st_mode):
            raise IndexDamaged(
                "the index is a symbolic link or no file, and never followed; check --repair rebuilds it"
            )
        file = (os.getpid(), found.st_dev, found.st_ino)
        if self._connection is None or self._opened != file:
            self._drop()
            self._connection, self._opened = self._open(), file
        return self._connection

    def _open(self) -> sqlite3.Connection:
        connection = _connect(self._path, self._busy_timeout)
        try:
            for pragma in ("synchronous = FULL", "cell_size_check = ON"):
                connection.execute(f"PRAGMA {pragma}")
            _check_about(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _drop(self) -> None:
        connection, opened = self._connection, self._opened
        self._connection = self._opened = None
        if connection is None:
            return
        if opened is not None and opened[0] != os.getpid():
            _ABANDONED.append(connection)
            return
        with contextlib.suppress(sqlite3.Error):
            connection.close()

    def _install(self, refs: Mapping[str, bytes]) -> None:
        """A whole index under a temporary name, then the damaged one aside, then the new one in.

        The old main file goes first: a crash from there on leaves "gone", never an old WAL beside
        a new file, which SQLite would replay into it.
        """
        temp = self._folder / f".new-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            _write_index(temp, refs)
            stamp = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(4)}"
            for companion in ("", *_COMPANIONS):
                damaged = Path(f"{self._path}{companion}")
                if os.path.lexists(damaged):
                    os.rename(damaged, self._folder / f"{SET_ASIDE}{stamp}-{INDEX}{companion}")
            os.rename(temp, self._path)
            sync_folder(self._folder)
        except sqlite3.Error as error:
            raise index_error(error, writable=True) from error
        finally:
            for left in (str(temp), f"{temp}-journal", *(f"{temp}{companion}" for companion in _COMPANIONS)):
                with contextlib.suppress(OSError):
                    os.unlink(left)


def _connect(path: Path, timeout: float) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=timeout, isolation_level=None, check_same_thread=False)
    connection.text_factory = bytes  # damaged names need not be UTF-8
    return connection


def _write_index(path: Path, refs: Mapping[str, bytes]) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    with contextlib.closing(_connect(path, 5.0)) as connection:
        with _transaction(connection):
            for statement in _SCHEMA:
                connection.execute(statement)
            connection.execute("INSERT INTO about VALUES ('version', ?)", (seal("version", b"%d" % VERSION),))
            connection.execute(f"PRAGMA user_version = {VERSION}")
            rows = ((name, seal(name, value)) for name, value in refs.items())
            connection.executemany("INSERT INTO refs VALUES (?, ?)", rows)
        if connection.execute("PRAGMA journal_mode = WAL").fetchone() != (b"wal",):
            raise StoreUnavailable("this folder's file system does not allow SQLite's write-ahead log")
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise


def _check_about(connection: sqlite3.Connection) -> None:
    """Raises UnknownVersion for a sound index of a newer format, IndexDamaged where the copies differ."""
    row = connection.execute("SELECT sealed FROM about WHERE name = 'version'").fetchone()
    kept = None if row is None else unseal("version", row[0])
    declared = b"%d" % connection.execute("PRAGMA user_version").fetchone()[0]
    if kept != declared or connection.execute("PRAGMA journal_mode").fetchone() != (b"wal",):
        raise IndexDamaged(
            "the index is damaged (its header is not what was written); check --repair rebuilds it"
        )
    if kept != b"%d" % VERSION:
        raise UnknownVersion(
            f"this store has an index of version {declared.decode()}; this build reads {VERSION}"
        )


def _damaged(rows: Iterable[tuple[object, object]]) -> Iterator[str]:
    for name, sealed in rows:
        try:
            unseal_row(name, sealed)
        except IndexDamaged as error:
            yield str(error)


def _read(connection: sqlite3.Connection, name: str) -> bytes | None:
    row = connection.execute("SELECT sealed FROM refs WHERE name = ?", (name,)).fetchone()
    return None if row is None else unseal(name, row[0])
