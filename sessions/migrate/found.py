"""What was found of each session and kept turn of a source: a table in a temporary file, since a store may
have more sessions than there is memory for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from serialization.blobs import BlobId
from sessions import names
from sessions.migrate.journal import Standing
from sessions.scratch import Scratch

#: Rows that are read at once.
_PAGE = 256

_SCHEMA = (
    "CREATE TABLE item (ref TEXT PRIMARY KEY, taken TEXT, standing TEXT, place TEXT, over TEXT, named TEXT,"
    " name TEXT, nbytes INT, why TEXT, clash INT) WITHOUT ROWID",
    "CREATE INDEX item_taken ON item (taken)",
    "CREATE TABLE needed (blob TEXT PRIMARY KEY, nbytes INT) WITHOUT ROWID",
    "CREATE TABLE thing (what TEXT PRIMARY KEY, count INT) WITHOUT ROWID",
)
_MOVES = f"standing IN ('{Standing.NEW}', '{Standing.BEHIND}') AND NOT clash"


@dataclass(frozen=True, slots=True)
class Item:
    """A session or kept turn of the source: its ref there, and the manifest that it is `taken` at. It goes to
    the ref `place`, where `over` is now, under `name` (in the source it is `named`). `clash`: something else
    is there, and `why` says what; or why it cannot be read."""

    ref: str
    taken: BlobId
    standing: Standing
    place: str
    over: BlobId | None = None
    named: str | None = None
    name: str | None = None
    nbytes: int = 0
    why: str = ""
    clash: bool = False

    @property
    def is_pin(self) -> bool:
        return self.ref.startswith(names.PINS)


@dataclass(frozen=True, slots=True)
class Seen:
    """An item, and what its manifest names where it was read."""

    item: Item
    session: str | None = None
    things: tuple[str, ...] = ()
    blobs: tuple[tuple[BlobId, int], ...] = ()


class Found:
    """Items, by their ref in the source. Close it."""

    def __init__(self) -> None:
        self._scratch = Scratch(*_SCHEMA)

    def close(self) -> None:
        self._scratch.close()

    def forget(self) -> None:
        """All items; what was needed and counted stays."""
        self._scratch.do("DELETE FROM item")

    def keep(self, seen: Seen) -> None:
        """In place of what was kept by the same ref."""
        item = seen.item
        self._scratch.do(
            "INSERT OR REPLACE INTO item VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            *(item.ref, item.taken, item.standing, item.place, item.over, item.named, item.name, item.nbytes),
            *(item.why, item.clash),
        )
        if item.clash or item.standing not in (Standing.NEW, Standing.BEHIND):
            return
        self._scratch.do_many("INSERT OR IGNORE INTO needed VALUES (?, ?)", seen.blobs)
        if not item.is_pin:
            for what in seen.things:
                self._scratch.do("INSERT OR IGNORE INTO thing VALUES (?, 0)", what)
                self._scratch.do("UPDATE thing SET count = count + 1 WHERE what = ?", what)

    def moving(self) -> Iterator[Item]:
        """What is to be written, sessions first: a kept turn follows its session's id."""
        for prefix in (names.SESSIONS, names.PINS):
            after = prefix
            while rows := list(
                self._scratch.rows(
                    f"SELECT * FROM item WHERE {_MOVES} AND ref > ? AND ref < ? ORDER BY ref LIMIT ?",
                    *(after, f"{prefix}\x7f", _PAGE),
                )
            ):
                yield from map(_item, rows)
                after = rows[-1][0]

    def num_moving(self, prefix: str = "") -> int:
        return self._scratch.number(
            f"SELECT COUNT(*) FROM item WHERE {_MOVES} AND ref >= ? AND ref < ?", prefix, f"{prefix}\x7f"
        )

    def moving_elsewhere(self) -> Iterator[Item]:
        """What comes under another name or id than it had."""
        query = f"SELECT * FROM item WHERE {_MOVES} AND (place <> ref OR name IS NOT named) ORDER BY ref"
        return map(_item, self._scratch.rows(query))

    def count(self, *standings: Standing, prefix: str = "") -> int:
        """How many there are that nothing else is in the place of."""
        marks = ", ".join(f"'{each}'" for each in standings)
        return self._scratch.number(
            f"SELECT COUNT(*) FROM item WHERE standing IN ({marks}) AND NOT clash AND ref >= ? AND ref < ?",
            *(prefix, f"{prefix}\x7f"),
        )

    def all(self, *standings: Standing) -> Iterator[Item]:
        marks = ", ".join(f"'{each}'" for each in standings)
        query = f"SELECT * FROM item WHERE standing IN ({marks}) AND NOT clash ORDER BY ref"
        return map(_item, self._scratch.rows(query))

    def clashes(self) -> Iterator[Item]:
        return map(_item, self._scratch.rows("SELECT * FROM item WHERE clash ORDER BY ref"))

    def num_things(self, what: str) -> int:
        """How many of what is to be moved have a note, a salt, a draft, or replies."""
        return self._scratch.number("SELECT SUM(count) FROM thing WHERE what = ?", what)

    def needed_nbytes(self) -> int:
        """Of the blobs of what is to be moved, each counted once."""
        return self._scratch.number("SELECT SUM(nbytes) FROM needed") + self._scratch.number(
            f"SELECT SUM(nbytes) FROM item WHERE {_MOVES}"
        )

    def is_current(self, blob: BlobId) -> bool:
        """Whether a session or kept turn stands at this manifest."""
        return self._scratch.row("SELECT 1 FROM item WHERE taken = ?", blob) is not None

    def session_there(self, session: str) -> str:
        """The id that a session of the source has in the destination."""
        row = self._scratch.row("SELECT place FROM item WHERE ref = ?", names.session_ref(session))
        return session if row is None else str(row[0]).removeprefix(names.SESSIONS)

    def has(self, ref: str) -> bool:
        """Whether the source has something by that ref."""
        return self._scratch.row("SELECT 1 FROM item WHERE ref = ?", ref) is not None

    def is_given(self, name: str, but_to: str) -> bool:
        """Whether something else than that ref has the name, or was given it."""
        query = "SELECT 1 FROM item WHERE name = ? AND ref <> ?"
        return self._scratch.row(query, name, but_to) is not None


def _item(row: Sequence[str | int | None]) -> Item:
    ref, taken, stands, place, over, named, name, nbytes, why, clash = row
    return Item(
        str(ref),
        BlobId(str(taken)),
        Standing(str(stands)),
        str(place),
        None if over is None else BlobId(str(over)),
        None if named is None else str(named),
        None if name is None else str(name),
        int(nbytes or 0),
        str(why),
        bool(clash),
    )
