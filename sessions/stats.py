"""What a store holds, counted: sessions, turns, tokens, and every byte by what it is for.

A store may have many more sessions than there is memory for: one manifest is read at a time, and who needs
which blobs is counted on the device (see `census`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Self

from engine.errors import StateError
from serialization.blobs import BlobClass, BlobId, BlobInfo, Store, blob_class
from serialization.manifest import Manifest
from sessions import names
from sessions.catalog import Catalog, Entry
from sessions.census import Census
from sessions.listing import count_turns

#: Until how many seconds something is of an age; what is older is of the last.
AGES = (("hour", 3600.0), ("day", 86400.0), ("week", 7 * 86400.0), ("month", 30 * 86400.0))
OLDER = "older"
#: How many sessions need the blob of a row of that table.
_USERS = "(SELECT COUNT(*) FROM uses WHERE uses.blob = {}.blob)"
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
    stats = StoreStats()
    with _Tally(store, _entries(store, stats)) as tally:
        stats.num_missing = tally.num_missing()
        stats.logical_bytes, stats.unique_bytes, stats.raw_bytes = tally.sums()
        for info, users in tally.blobs():
            _count_blob(stats, info, users)
    stats.total_bytes = store.usage()
    stats.index_bytes = max(0, stats.total_bytes - sum(each.nbytes for each in stats.ages.values()))
    return stats


def _entries(store: Store, stats: StoreStats) -> Iterator[Entry]:
    """What can be read, counted as it goes by."""
    now = store.now()
    for ref, found in Catalog(store).read_each(names.SESSIONS, names.PINS):
        if isinstance(found, StateError):
            stats.num_unreadable += 1
            continue
        if ref.startswith(names.SESSIONS):
            _count_session(stats, found.manifest, now)
        else:
            stats.num_pins += 1
        yield found


def _count_session(stats: StoreStats, manifest: Manifest, now: float) -> None:
    stats.num_sessions += 1
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


class _Tally:
    """A census, and the sizes that manifests tell: of rows and point state, before and after encoding."""

    def __init__(self, store: Store, entries: Iterable[Entry]) -> None:
        self._census = Census(store, ())
        self._scratch = self._census.scratch
        self._scratch.do("CREATE TABLE size (blob TEXT PRIMARY KEY, raw INT, nbytes INT) WITHOUT ROWID")
        for entry in entries:
            self._census.add(entry)
            sizes = ((ref.blob, ref.raw_nbytes, ref.nbytes) for ref in entry.manifest.blobs())
            self._scratch.do_many("INSERT OR IGNORE INTO size VALUES (?, ?, ?)", sizes)
        self._census.look()

    def blobs(self) -> Iterator[tuple[BlobInfo, int]]:
        """Each that is stored, and how many sessions need it."""
        query = f"SELECT blob, nbytes, age, {_USERS.format('stored')} FROM stored"
        for blob, nbytes, age, users in self._scratch.rows(query):
            yield BlobInfo(BlobId(blob), nbytes, age), users

    def num_missing(self) -> int:
        return self._scratch.number(
            "SELECT COUNT(DISTINCT blob) FROM uses"
            " WHERE NOT EXISTS (SELECT 1 FROM stored WHERE stored.blob = uses.blob)"
        )

    def sums(self) -> tuple[int, int, int]:
        """Bytes of all who need them together, of each blob once, and of these before encoding."""
        logical, unique, raw = (
            self._scratch.number(f"SELECT SUM({each}) FROM size")
            for each in (f"nbytes * {_USERS.format('size')}", "nbytes", "raw")
        )
        return logical, unique, raw

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._census.close()
