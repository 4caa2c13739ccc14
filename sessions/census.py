"""`Census`: who needs which blobs, by one look at every session and pin of a store.

It is kept in a temporary file: a store may have more sessions than there is memory for their manifests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

from serialization.blobs import BlobClass, BlobId, BlobInfo, Store
from sessions import names
from sessions.catalog import Entry
from sessions.reduce import has_rows
from sessions.scratch import Scratch

_SCHEMA = (
    "CREATE TABLE entry (place TEXT PRIMARY KEY, session TEXT, pin INT, turn TEXT, updated REAL, rows INT)"
    " WITHOUT ROWID",
    "CREATE TABLE uses (blob TEXT, session TEXT, PRIMARY KEY (blob, session)) WITHOUT ROWID",
    "CREATE TABLE stored (blob TEXT PRIMARY KEY, nbytes INT, age REAL) WITHOUT ROWID",
)
_IS_MANIFEST = f"LIKE '{BlobClass.MANIFEST}-%'"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Stored bytes of what a session and its pins need: what nobody else does, and what others do, too."""

    own: int
    shared: int


class Census:
    """A session and its own pins count as one that needs a blob. Close it, or use it in a `with`."""

    def __init__(self, store: Store, entries: Iterable[Entry]) -> None:
        """Counts `entries`: all sessions and pins of the `store`, or those that can be read. Raises what they
        raise, StoreFull, StoreUnavailable."""
        self.scratch = Scratch(*_SCHEMA)
        self._store = store
        try:
            for entry in entries:
                self.add(entry)
        except BaseException:
            self.close()
            raise

    def add(self, entry: Entry) -> None:
        manifest, pin = entry.manifest, entry.ref.startswith(names.PINS)
        place = entry.blob if pin else manifest.session  # the name of a pin may be sealed
        self.scratch.do(
            "INSERT OR REPLACE INTO entry VALUES (?, ?, ?, ?, ?, ?)",
            *(place, manifest.session, pin, entry.blob, manifest.updated, has_rows(manifest)),
        )
        uses = ((blob, manifest.session) for blob in entry.blobs())
        self.scratch.do_many("INSERT OR IGNORE INTO uses VALUES (?, ?)", uses)

    def look(self) -> None:
        """At the blobs that are stored, with their sizes and ages."""
        rows = ((info.blob, info.nbytes, info.age) for info in self._store.list_blobs())
        self.scratch.do_many("INSERT OR REPLACE INTO stored VALUES (?, ?, ?)", rows)

    def needs(self, blob: BlobId) -> bool:
        return self.scratch.row("SELECT 1 FROM uses WHERE blob = ?", blob) is not None

    def has_session(self, session: str) -> bool:
        return self.turn(session) is not None

    def turn(self, session: str) -> BlobId | None:
        """Where the session stands."""
        found = self.scratch.row("SELECT turn FROM entry WHERE place = ?", session)
        return None if found is None else BlobId(found[0])

    # --- after `look` -------------------------------------------------------------------------

    def unneeded(self, older_than: float) -> Iterator[BlobInfo]:
        """Blobs that no ref needs, of that age in seconds or more."""
        query = (
            "SELECT * FROM stored WHERE age >= ?"
            " AND NOT EXISTS (SELECT 1 FROM uses WHERE uses.blob = stored.blob)"
        )
        return (BlobInfo(BlobId(row[0]), row[1], row[2]) for row in self.scratch.rows(query, older_than))

    def manifest_bytes(self) -> int:
        """Stored bytes of the manifests that some ref needs."""
        return self._nbytes_needed(f"blob {_IS_MANIFEST}")

    def rows_bytes(self) -> int:
        """Stored bytes of the rows and point state that some ref needs."""
        return self._nbytes_needed(f"NOT blob {_IS_MANIFEST}")

    def nbytes(self) -> int:
        """Stored bytes of all blobs."""
        return self.scratch.number("SELECT SUM(nbytes) FROM stored")

    def sizes(self) -> Iterator[tuple[str, Sizes]]:
        """Of every session that has any."""
        query = """
            SELECT session, SUM(nbytes * (users = 1)), SUM(nbytes * (users > 1)) FROM (
                SELECT uses.session AS session, stored.nbytes AS nbytes,
                    (SELECT COUNT(*) FROM uses AS all_uses WHERE all_uses.blob = uses.blob) AS users
                FROM uses JOIN stored ON stored.blob = uses.blob
            ) GROUP BY session
        """
        return ((session, Sizes(own, shared)) for session, own, shared in self.scratch.rows(query))

    def _nbytes_needed(self, where: str) -> int:
        return self.scratch.number(
            f"SELECT SUM(nbytes) FROM stored WHERE {where}"
            " AND EXISTS (SELECT 1 FROM uses WHERE uses.blob = stored.blob)"
        )

    def close(self) -> None:
        self.scratch.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
