"""What a store holds, counted: sessions, turns, tokens, and every byte by what it is for.

A store may have many more sessions than there is memory for. So one manifest is read at a time, and which
blobs how many sessions need is counted in a database of its own in the system's temporary folder, which is
gone with the process.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from engine.errors import StateError, StoreFull
from serialization.blobs import BlobClass, BlobId, BlobInfo, Store, blob_class
from serialization.manifest import Manifest
from sessions import names
from sessions.catalog import Catalog, Entry
from sessions.listing import count_turns

#: Until how many seconds something is of an age; what is older is of the last.
AGES = (("hour", 3600.0), ("day", 86400.0), ("week", 7 * 86400.0), ("month", 30 * 86400.0))
OLDER = "older"
_BANDS: tuple[str, ...] = (*(name for name, _ in AGES), OLDER)


@dataclass(slots=True)
class ClassBytes:
    """Stored blobs of one class: of one session alone, of several, and of none (gc takes them in time)."""

    num_blobs: int = 0
    own: int = 0
    shared: int = 0
    unreferenced: int = 0


@dataclass(slots=True)
class AgeBytes:
    """Sessions that were last saved, and blobs that were last put, so long ago."""

    num_sessions: int = 0
    num_blobs: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Moment:
    """When something was said of which session, in seconds since the epoch."""

    session: str
    at: float


@dataclass(slots=True)
class StoreStats:
    """What one tenant has. Bytes are as stored, unless they are called otherwise.

    `logical_bytes` are those that sessions would take without sharing: each with all of its rows and point
    state; `unique_bytes` are what these take once, and `raw_bytes` the same before encoding. `num_missing`
    blobs are needed and not there (given up by age, evicted, or damage: `check` tells); `num_unreadable`
    sessions and pins have no manifest that could be read, and are in no other figure.
    """

    num_sessions: int = 0
    num_pins: int = 0
    num_unreadable: int = 0
    num_forks: int = 0
    num_turns: int = 0
    num_tokens: int = 0
    num_missing: int = 0
    oldest: Moment | None = None
    newest: Moment | None = None
    classes: dict[BlobClass, ClassBytes] = field(
        default_factory=lambda: {each: ClassBytes() for each in BlobClass}
    )
    ages: dict[str, AgeBytes] = field(default_factory=lambda: {each: AgeBytes() for each in _BANDS})
    logical_bytes: int = 0
    unique_bytes: int = 0
    raw_bytes: int = 0
    index_bytes: int = 0
    total_bytes: int = 0

    @property
    def sharing(self) -> float | None:
        """How many times larger it would be if nothing were shared; None where there are no rows."""
        return self.logical_bytes / self.unique_bytes if self.unique_bytes else None

    @property
    def compression(self) -> float | None:
        """How many times larger rows and point state would be unencoded."""
        return self.raw_bytes / self.unique_bytes if self.unique_bytes else None


def count(store: Store) -> StoreStats:
    """Read every manifest, and list every blob. Raises StoreFull where there is no room to count in."""
    stats, now = StoreStats(), store.now()
    with _Needs.opened() as needs:
        for entry, pins in _entries(store, stats):
            if entry is not None:
                _count_session(stats, entry.manifest, now)
            needs.add([*([entry] if entry else []), *pins])
        stats.logical_bytes, stats.unique_bytes, stats.raw_bytes = needs.sums()
        found = blob_bytes = 0
        for info in store.list_blobs():
            users = needs.users(info.blob)
            found += users > 0
            blob_bytes += info.nbytes
            _count_blob(stats, info, users)
        stats.num_missing = len(needs) - found
    stats.total_bytes = store.usage()
    stats.index_bytes = max(0, stats.total_bytes - blob_bytes)
    return stats


def _entries(store: Store, stats: StoreStats) -> Iterator[tuple[Entry | None, list[Entry]]]:
    """Each session with its pins: they count as one user of what they share. Then pins of sessions that are
    gone. Of pins, which people made one by one, the refs alone are remembered."""
    catalog, by_session = Catalog(store), _pins(store, stats)
    for ref, value in store.list_refs(names.SESSIONS):
        entry = _read(catalog, stats, ref, value)
        if entry is not None:
            stats.num_sessions += 1
            pins = by_session.pop(entry.manifest.session, [])
            yield entry, [each for each in (_read(catalog, stats, *pin) for pin in pins) if each]
    for pins in by_session.values():
        yield None, [each for each in (_read(catalog, stats, *pin) for pin in pins) if each]


def _pins(store: Store, stats: StoreStats) -> dict[str, list[tuple[str, bytes]]]:
    found: dict[str, list[tuple[str, bytes]]] = {}
    for ref, value in store.list_refs(names.PINS):
        entry = _read(Catalog(store), stats, ref, value)
        if entry is not None:
            stats.num_pins += 1
            found.setdefault(entry.manifest.session, []).append((ref, value))
    return found


def _read(catalog: Catalog, stats: StoreStats, ref: str, value: bytes) -> Entry | None:
    """None for one that cannot be read, and for one that is gone since it was listed."""
    try:
        return catalog.latest(ref, value)
    except StateError:
        stats.num_unreadable += 1
        return None


def _count_session(stats: StoreStats, manifest: Manifest, now: float) -> None:
    stats.num_forks += manifest.forked_from is not None
    stats.num_turns += count_turns(manifest)
    stats.num_tokens += manifest.length
    if stats.oldest is None or manifest.created < stats.oldest.at:
        stats.oldest = Moment(manifest.session, manifest.created)
    if stats.newest is None or manifest.updated > stats.newest.at:
        stats.newest = Moment(manifest.session, manifest.updated)
    stats.ages[_band(now - manifest.updated)].num_sessions += 1


def _count_blob(stats: StoreStats, info: BlobInfo, users: int) -> None:
    of_class, of_age = stats.classes[blob_class(info.blob)], stats.ages[_band(info.age)]
    of_class.num_blobs += 1
    if users == 0:
        of_class.unreferenced += info.nbytes
    elif users == 1:
        of_class.own += info.nbytes
    else:
        of_class.shared += info.nbytes
    of_age.num_blobs += 1
    of_age.nbytes += info.nbytes


def _band(age: float) -> str:
    return next((name for name, most in AGES if age < most), OLDER)


class _Needs:
    """How many sessions need each blob, on the device rather than in memory."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    @classmethod
    @contextlib.contextmanager
    def opened(cls) -> Iterator[_Needs]:
        with contextlib.closing(sqlite3.connect("", isolation_level=None)) as database:
            for statement in (
                "PRAGMA journal_mode = OFF",
                "PRAGMA synchronous = OFF",
                "PRAGMA cache_size = -16384",
                "CREATE TABLE needs (blob BLOB PRIMARY KEY, raw INT, nbytes INT, users INT) WITHOUT ROWID",
                "BEGIN",
            ):
                database.execute(statement)
            try:
                yield cls(database)
            except sqlite3.OperationalError as error:
                raise StoreFull(f"no room to count in, in the system's temporary folder: {error}") from error

    def add(self, entries: Iterable[Entry]) -> None:
        """One user of all that `entries` name. Of manifests no size is known, and none is needed."""
        needed: dict[BlobId, tuple[int, int]] = {}
        for entry in entries:
            needed[entry.blob] = (0, 0)
            needed.update((ref.blob, (ref.raw_nbytes, ref.nbytes)) for ref in entry.manifest.blobs())
        self._database.executemany(
            "INSERT INTO needs VALUES (?, ?, ?, 1) ON CONFLICT DO UPDATE SET users = users + 1",
            ((_key(blob), *sizes) for blob, sizes in needed.items()),
        )

    def users(self, blob: BlobId) -> int:
        row = self._database.execute("SELECT users FROM needs WHERE blob = ?", (_key(blob),)).fetchone()
        return 0 if row is None else int(row[0])

    def sums(self) -> tuple[int, int, int]:
        """Bytes of all users together, of each blob once, and of these before encoding."""
        row = self._database.execute(
            "SELECT sum(nbytes * users), sum(nbytes), sum(raw) FROM needs"
        ).fetchone()
        logical, unique, raw = (int(each or 0) for each in row)
        return logical, unique, raw

    def __len__(self) -> int:
        return int(self._database.execute("SELECT count(*) FROM needs").fetchone()[0])


def _key(blob: BlobId) -> bytes:
    """A third of the name's size."""
    cls, kind, digest = blob.split("-")
    return cls[:1].encode() + kind[:1].encode() + bytes.fromhex(digest)
