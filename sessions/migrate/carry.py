"""Blobs on their way from one store to another: each once, verified, and few at a time in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from engine.errors import BlobMissing, StoreUnavailable
from serialization.blobs import BlobClass, BlobId, Store, blob_class
from serialization.manifest import Manifest
from serialization.renaming import renamed
from serialization.snapshot import missing_blobs, verify_kept
from sessions import salts
from sessions.commits import NEW_SESSION_NBYTES
from sessions.migrate.plan import Item
from sessions.quota import Room
from sessions.reduce import without
from sessions.scratch import Scratch

#: Bytes of blobs that are in memory at once, in the hands of all threads.
IN_FLIGHT = 32 * 2**20
#: How often a session is gone through again that took so long that gc might have met its first blobs.
_SLOW_TRIES = 3


@dataclass(frozen=True, slots=True)
class Carried:
    """A manifest whose blobs are in the destination, and is so itself, as `blob`. `lost` of its blobs were
    not in the source any more, where such a thing happens by age. `at` is when it was carried
    (`time.monotonic`): not long after, no gc takes any of it."""

    manifest: Manifest
    blob: BlobId
    lost: int
    at: float


class Conversion(Protocol):
    """What becomes of a session's rows on their way."""

    def plan(self, manifest: Manifest) -> tuple[Item, ...]:
        """What it would do with a session. Raises nothing: what it refuses is an item too."""
        ...

    def most_nbytes(self, manifest: Manifest) -> int:
        """How many bytes of blobs `convert` puts at most."""
        ...

    def convert(self, manifest: Manifest, source: Store, target: Store) -> Manifest:
        """The session by blobs of `target`, which are all put when this returns. Raises StateError,
        StoreError."""
        ...


class InFlight:
    """Lets so many bytes be in memory at once; what is larger by itself goes alone."""

    def __init__(self, most: int = IN_FLIGHT) -> None:
        self._most = most
        self._used = 0
        self._changed = threading.Condition()

    @contextmanager
    def room(self, nbytes: int) -> Iterator[None]:
        taken = min(nbytes, self._most)
        with self._changed:
            self._changed.wait_for(lambda: self._used + taken <= self._most)
            self._used += taken
        try:
            yield
        finally:
            with self._changed:
                self._used -= taken
                self._changed.notify_all()


class Copies:
    """Which blobs of `source` were put in `target` as what, and when: what sessions share is carried once.
    Safe from many threads."""

    def __init__(self, source: Store, target: Store, fresh: float) -> None:
        """A put is as good as now for `fresh` seconds, in which no gc takes what was put."""
        self._source = source
        self._target = target
        self._fresh = fresh
        self._flight = InFlight()
        self._lock = threading.Lock()
        self._carrying = threading.Condition(self._lock)
        self._carried: set[tuple[BlobId, str]] = set()
        self.nbytes = 0
        self._put = Scratch(
            "CREATE TABLE put (blob TEXT, own TEXT, made TEXT, at REAL, PRIMARY KEY (blob, own))"
            " WITHOUT ROWID"
        )

    def close(self) -> None:
        self._put.close()

    def missing_nbytes(self, manifest: Manifest, session: str) -> int:
        """Bytes of what is still to be put for the session."""
        own = self._own(session)
        with self._lock:
            return sum(ref.nbytes for ref in manifest.blobs() if self._known(ref.blob, own) is None)

    def copy(self, manifest: Manifest, session: str) -> tuple[Manifest, tuple[BlobId, ...]]:
        """`manifest` by blobs of the destination, all of which were put just now, for `session`; and those
        that vanished from the source by age. Raises StateError, StoreError."""
        own, target = self._own(session), self._target.scoped(session)
        for _ in range(_SLOW_TRIES):
            begun = time.monotonic()
            made: dict[BlobId, BlobId] = {}
            lost: list[BlobId] = []
            for ref in manifest.blobs():
                try:
                    made[ref.blob] = self._put_once(ref.blob, ref.nbytes, own, target)
                except BlobMissing:
                    if not self._source.rows_expire:
                        raise
                    lost.append(ref.blob)
            if time.monotonic() - begun < self._fresh:
                other = {blob: name for blob, name in made.items() if name != blob}
                return (renamed(manifest, other) if other else manifest), tuple(lost)
        raise StoreUnavailable("the destination is so slow that gc might delete what is put there")

    def _put_once(self, blob: BlobId, nbytes: int, own: str, target: Store) -> BlobId:
        """What it was put as, now or not long ago; where another thread is about it, that is waited for."""
        key = (blob, own)
        with self._carrying:
            self._carrying.wait_for(lambda: key not in self._carried)
            known = self._known(blob, own)
            if known is not None:
                return known
            self._carried.add(key)
        try:
            return self._carry(blob, nbytes, own, target)
        finally:
            with self._carrying:
                self._carried.discard(key)
                self._carrying.notify_all()

    def _carry(self, blob: BlobId, nbytes: int, own: str, target: Store) -> BlobId:
        with self._flight.room(nbytes):
            data = self._source.get(blob)
            at = time.monotonic()
            made = target.put(blob_class(blob), data)
        with self._lock:
            self.nbytes += nbytes
            self._put.do("INSERT OR REPLACE INTO put VALUES (?, ?, ?, ?)", blob, own, made, at)
        return made

    def _known(self, blob: BlobId, own: str) -> BlobId | None:
        """What it was put as, where that was not long ago. The lock is held."""
        row = self._put.row("SELECT made, at FROM put WHERE blob = ? AND own = ?", blob, own)
        if row is None or time.monotonic() - float(row[1]) > self._fresh:
            return None
        return BlobId(row[0])

    def _own(self, session: str) -> str:
        return "" if self._target.scoped(session) is self._target else session


class Carrier:
    """Carries sessions, by their manifests, and puts those too. What is put and not committed is gc's."""

    def __init__(
        self,
        source: Store,
        target: Store,
        conversion: Conversion | None,
        room: Room,
        fresh: float,
        newest: bool = False,
    ) -> None:
        """A put is as good as now for `fresh` seconds, as for `Copies`. `newest`: manifests are written in
        the newest format, also where nothing else of them changes."""
        self._source = source
        self._target = target
        self._conversion = conversion
        self._room = room
        self._newest = newest
        self._fresh = fresh
        self._copies = Copies(source, target, fresh)
        self._lock = threading.Lock()
        self._nbytes = 0

    def close(self) -> None:
        self._copies.close()

    @property
    def nbytes(self) -> int:
        """Bytes of blobs that were put, as they are in the source where they are copies."""
        return self._nbytes + self._copies.nbytes

    def carry(
        self, taken: BlobId, session: Callable[[str], str], name: str | None, granted: ExitStack
    ) -> Carried:
        """What the source has as `taken`, under `name` in the destination and for the session that `session`
        makes of its own. Where nothing of it changes its bytes are the same. Room under the quota is held in
        `granted`. Raises StateError, StoreError."""
        data = self._source.get(taken)
        before = Manifest.decode(data)
        to = session(before.session)
        granted.enter_context(self._room(self._most_nbytes(before, to) + len(data) + NEW_SESSION_NBYTES))
        manifest, lost = self._converted(before, to)
        if lost and self._conversion is None and not self._target.rows_expire:
            manifest = without(manifest, lost)
        manifest = _named(manifest, to, name)
        encoded = data if manifest == before and not self._newest else manifest.encode()
        blob = self._target.scoped(to).put(BlobClass.MANIFEST, encoded)
        with self._lock:
            self._nbytes += len(encoded)
            if self._conversion is not None:
                self._nbytes += sum(ref.nbytes for ref in manifest.blobs())
        return Carried(manifest, blob, len(lost), time.monotonic())

    def is_fresh(self, carried: Carried) -> bool:
        """Whether it may still be committed; else it is to be carried again."""
        return time.monotonic() - carried.at < self._fresh

    def _most_nbytes(self, manifest: Manifest, session: str) -> int:
        if self._conversion is None:
            return self._copies.missing_nbytes(manifest, session)
        return self._conversion.most_nbytes(manifest)

    def _converted(self, manifest: Manifest, session: str) -> tuple[Manifest, tuple[BlobId, ...]]:
        if self._conversion is None:
            return self._copies.copy(manifest, session)
        lost: tuple[BlobId, ...] = ()
        if self._source.rows_expire:
            lost = tuple(missing_blobs(self._source, manifest))
            manifest = without(manifest, lost)
        begun = time.monotonic()
        made = self._conversion.convert(manifest, self._source, self._target.scoped(session))
        if time.monotonic() - begun >= self._fresh:
            verify_kept(self._target, made)  # gc might have met the first of them
        return made, lost


def _named(manifest: Manifest, session: str, name: str | None) -> Manifest:
    """By that id and name; another id has no earlier turns, and no salt that another session has alone."""
    manifest = replace(manifest, name=name) if manifest.pin is None else replace(manifest, pin=name)
    if manifest.session == session:
        return manifest
    return replace(manifest, session=session, parent=None, salt=salts.of_fork(manifest, session))
