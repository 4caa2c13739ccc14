"""Pins: turns kept under a name, which gc and TTL spare."""

from __future__ import annotations

from dataclasses import replace

from engine.errors import SessionExists, StaleSession
from serialization.blobs import BlobClass, BlobId, Store
from serialization.manifest import Manifest, ManifestKind
from sessions import names
from sessions.catalog import Catalog, Entry
from sessions.commits import NEW_SESSION_NBYTES
from sessions.quota import Room
from sessions.session import Pin


class Pins:
    """Pin, list and unpin the stored turns of one store. A pin has a manifest of its own, so that a
    rebuilt index finds it again."""

    def __init__(self, store: Store, room: Room) -> None:
        self._store = store
        self._room = room
        self._catalog = Catalog(store)

    def add(self, entry: Entry, name: str) -> Pin:
        """Keep `entry` under `name`. Raises SessionExists, NameRefused, StaleSession, QuotaExceeded."""
        return self._keep(entry, name, None)

    def replace(self, entry: Entry, name: str) -> Pin:
        """The same in place of what is kept under that name: after an error it still is. Raises NameRefused,
        StaleSession, QuotaExceeded."""
        names.check_name(name)
        old = self._store.read(names.pin_ref(name))
        pin = self._keep(entry, name, old)
        if old is not None and self._store.read(names.pin_ref(name)) != old:
            self._store.delete_blob(BlobId(old.decode()), 0)  # as in `remove`
        return pin

    def _keep(self, entry: Entry, name: str, old: bytes | None) -> Pin:
        names.check_name(name)
        source = entry.manifest
        pinned = replace(
            source, kind=ManifestKind.PIN, pin=name, parent=entry.blob, updated=self._store.now()
        )
        data = pinned.encode()
        with self._room(len(data) + NEW_SESSION_NBYTES):
            return self._put(entry, name, pinned, data, old)

    def _put(self, entry: Entry, name: str, pinned: Manifest, data: bytes, old: bytes | None) -> Pin:
        source = entry.manifest
        blob = self._store.scoped(source.session).put(BlobClass.MANIFEST, data)
        # Only while the session still stands at this turn: else gc might already have met its blobs.
        if not self._store.swap(names.pin_ref(name), old, blob.encode(), guard=entry.guard):
            now = self._store.read(names.pin_ref(name))
            if old is not None and now != old:
                raise StaleSession(f"pin {name!r} was changed by another writer")
            if old is None and now is not None:
                raise SessionExists(f"a pin named {name!r} exists already")
            raise StaleSession(f"session {source.session} moved on while it was pinned; pin it again")
        return Pin(name, source.session, len(source.tokens), pinned.updated)

    def list(self) -> list[Pin]:
        """By name; one that cannot be read is left out."""
        found = [(names.name_of_pin(each.ref), each.manifest) for each in self._catalog.readable_pins()]
        return [
            Pin(name, manifest.session, manifest.length, manifest.updated)
            for name, manifest in sorted(found, key=lambda each: each[0])
        ]

    def remove(self, name: str) -> None:
        """Raises SessionNotFound."""
        entry = self._catalog.pin(name)
        if not self._store.swap(entry.ref, entry.blob.encode(), None):
            raise StaleSession(f"pin {name!r} was changed by another writer")
        self._store.delete_blob(entry.blob, 0)  # no one else's, and a rebuilt index must not find it
