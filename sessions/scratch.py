"""What would not fit in memory: tables in a temporary file that nobody else can open, gone with its handle.

SQLite makes it where the system keeps temporary files, and unlinks it at once; little of it is in memory at
any time. Of what a store seals nothing is put here but ids of sessions.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Self, TypeVar

from engine.errors import StoreFull, StoreUnavailable

Made = TypeVar("Made")

#: KiB of a file's pages that are kept in memory.
_CACHE = 2048


class Scratch:
    """Tables, made by the statements `schema`. One thread at a time. Raises StoreFull, StoreUnavailable."""

    def __init__(self, *schema: str) -> None:
        # The empty name is of a temporary file; no transaction is ever ended, since nothing is to survive.
        self._connection = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        for statement in (
            "PRAGMA journal_mode = OFF",
            "PRAGMA synchronous = OFF",
            f"PRAGMA cache_size = -{_CACHE}",
            "BEGIN",
            *schema,
        ):
            self.do(statement)

    def do(self, statement: str, *values: object) -> int:
        """Returns how many rows it changed."""
        with _errors():
            return self._connection.execute(statement, values).rowcount

    def do_many(self, statement: str, rows: Iterable[tuple[object, ...]]) -> None:
        with _errors():
            self._connection.executemany(statement, rows)

    def rows(self, query: str, *values: object) -> Iterator[tuple[Any, ...]]:
        """Read on as they are asked for."""
        with _errors():
            yield from self._connection.execute(query, values)

    def row(self, query: str, *values: object) -> tuple[Any, ...] | None:
        """The first."""
        return next(self.rows(query, *values), None)

    def number(self, query: str, *values: object) -> int:
        """The one number that the query asks for; 0 for NULL."""
        found = self.row(query, *values)
        return 0 if found is None or found[0] is None else int(found[0])

    def close(self) -> None:
        """Also what happens to one that nobody holds any more."""
        self._connection.close()

    __del__ = close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Rows(Collection[Made]):
    """What a query finds, asked anew each time; `make` is given the columns of a row."""

    def __init__(self, scratch: Scratch, query: str, make: Callable[..., Made]) -> None:
        self._scratch, self._query, self._make = scratch, query, make

    def __len__(self) -> int:
        return self._scratch.number(f"SELECT COUNT(*) FROM ({self._query})")

    def __iter__(self) -> Iterator[Made]:
        return (self._make(*row) for row in self._scratch.rows(self._query))

    def __contains__(self, item: object) -> bool:
        return any(found == item for found in self)


class Seen:
    """A set of texts that may be large."""

    def __init__(self) -> None:
        self._scratch = Scratch("CREATE TABLE seen (text TEXT PRIMARY KEY) WITHOUT ROWID")

    def add(self, text: str) -> bool:
        """Whether it is new."""
        return self._scratch.do("INSERT OR IGNORE INTO seen VALUES (?)", text) == 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._scratch.close()


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        if error.__dict__.get("sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL:
            raise StoreFull("no room for temporary files") from error
        raise StoreUnavailable(f"a temporary file cannot be used: {error}") from error
