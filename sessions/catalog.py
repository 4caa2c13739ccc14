"""The catalog: from names, ids and pins to manifests, through the refs of a store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

from engine.errors import (
    BlobMissing,
    SessionAmbiguous,
    SessionExists,
    SessionExpired,
    SessionNotFound,
    StateError,
)
from serialization.blobs import BlobId, Store, parse_blob_id
from serialization.manifest import Manifest
from sessions import names
from sessions.lease import read_lease

#: Of the sessions that a start of an id could mean so many are counted.
_TOLD = 99


@dataclass(frozen=True, slots=True)
class Entry:
    """A manifest, the blob it is stored as, and the ref that names it."""

    ref: str
    blob: BlobId
    manifest: Manifest

    @property
    def guard(self) -> tuple[str, bytes]:
        """Holds while the ref still names this manifest."""
        return self.ref, self.blob.encode()

    def blobs(self) -> Iterator[BlobId]:
        """The manifest's own blob, and every one that it names."""
        yield self.blob
        for ref in self.manifest.blobs():
            yield ref.blob


class Catalog:
    """Reads and moves the refs of one store. Holds nothing itself."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def session(self, session: str, known: Entry | None = None) -> Entry:
        """The stored turn of a session id; `known`, if it is that one still. Raises SessionNotFound."""
        ref = names.session_ref(session)
        if known is not None and known.ref == ref and self._store.read(ref) == known.blob.encode():
            return known
        return self._entry(ref, f"there is no session {session}")

    def pin(self, name: str) -> Entry:
        """The turn pinned under `name`. Raises SessionNotFound, NameRefused."""
        return self._entry(names.pin_ref(names.check_name(name)), f"there is no pin {name!r}")

    def find(self, ref: str) -> str:
        """The session id that an id, a unique start of one, or a name means.

        Raises SessionNotFound, SessionAmbiguous, NameRefused.
        """
        if names.is_session_id(ref):
            if self._store.read(names.session_ref(ref.upper())) is None:
                raise self._absent(names.session_ref(ref.upper()), f"there is no session {ref}")
            return ref.upper()
        named = self.named(names.check_name(ref))
        if named is not None:
            return named
        found: list[tuple[str, bytes]] = []
        if ref.isalnum():
            found = list(islice(self._store.list_refs(names.session_ref(ref.upper())), _TOLD + 1))
        if len(found) > 1:
            count = str(len(found)) if len(found) <= _TOLD else f"more than {_TOLD}"
            raise SessionAmbiguous(f"{ref!r} is the start of {count} session ids")
        if not found:
            raise SessionNotFound(f"there is no session {ref!r}")
        return found[0][0].removeprefix(names.SESSIONS)

    def named(self, name: str) -> str | None:
        """The stored session of that name. A name whose session is gone is free."""
        value = self._store.read(names.name_ref(name))
        if value is None or self._store.read(names.session_ref(value.decode())) is None:
            return None
        return value.decode()

    def check_free(self, name: str, but_for: str | None = None) -> None:
        """Raises SessionExists if another session than `but_for` has the name, also one that is written
        to and not stored yet; NameRefused."""
        value = self._store.read(names.name_ref(names.check_name(name)))
        if value is not None and value.decode() != but_for and is_there(self._store, value.decode()):
            raise SessionExists(f"a session named {name!r} exists already")

    def take_name(self, name: str, session: str) -> None:
        """Give `name` to `session`. Raises SessionExists if another one has it by now."""
        ref = names.name_ref(name)
        old = self._store.read(ref)
        self.check_free(name, but_for=session)
        if old != session.encode() and not self._store.swap(ref, old, session.encode()):
            raise SessionExists(f"a session named {name!r} exists already")

    def drop_name(self, name: str, session: str) -> None:
        self._store.swap(names.name_ref(name), session.encode(), None)

    def entries(self) -> Iterator[Entry]:
        """Every session, then every pin. Raises StateError at the first that cannot be read."""
        for _, found in self.read_each(names.SESSIONS, names.PINS):
            if isinstance(found, StateError):
                raise found
            yield found

    def readable(self) -> Iterator[Entry]:
        """The same of those that can be read: one that is damaged does not hide the others."""
        each = self.read_each(names.SESSIONS, names.PINS)
        return (found for _, found in each if isinstance(found, Entry))

    def readable_pins(self) -> Iterator[Entry]:
        return (found for _, found in self.read_each(names.PINS) if isinstance(found, Entry))

    def unreadable(self) -> dict[str, StateError]:
        """By ref, what of sessions and pins cannot be read."""
        each = self.read_each(names.SESSIONS, names.PINS)
        return {ref: found for ref, found in each if isinstance(found, StateError)}

    def read_each(self, *prefixes: str) -> Iterator[tuple[str, Entry | StateError]]:
        """What each ref of these beginnings names, or why that cannot be read."""
        for ref, value in chain.from_iterable(map(self._store.list_refs, prefixes)):
            try:
                entry = self._latest(ref, value)
            except StateError as error:
                yield ref, error
                continue
            if entry is not None:
                yield ref, entry

    def _latest(self, ref: str, value: bytes | None) -> Entry | None:
        """What the ref names; where that is gone because the ref was moved by now, what it names by now."""
        while value is not None:
            try:
                return self.read_entry(ref, value)
            except BlobMissing:
                now = self._store.read(ref)
                if now == value:
                    raise
                value = now
        return None

    def read_entry(self, ref: str, value: bytes) -> Entry:
        """The manifest that a ref's value names. Raises BlobMissing, Corrupt, UnknownVersion…"""
        blob = parse_blob_id(value.decode("ascii", "replace"))
        return Entry(ref, blob, Manifest.decode(self._store.get(blob)))

    def _entry(self, ref: str, absent: str) -> Entry:
        try:
            entry = self._latest(ref, self._store.read(ref))
        except BlobMissing:
            if self._store.since() is None:
                raise
            raise SessionExpired(f"{absent} any more: the store lost what it had of it") from None
        if entry is None:
            raise self._absent(ref, absent)
        return entry

    def _absent(self, ref: str, absent: str) -> SessionNotFound:
        """Why there is no such ref: a session's id says when it was made."""
        session, since = ref.removeprefix(names.SESSIONS), self._store.since()
        if since is None or not names.is_session_id(session) or names.made(session) >= since:
            return SessionNotFound(absent)
        return SessionExpired(f"{absent} any more: the store lost what it had before {_moment(since)}")


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def is_there(store: Store, session: str) -> bool:
    """Whether the session is stored, or somebody is writing to it. The lease is asked first: a first save
    stores the session before its lease ends."""
    lease = read_lease(store, session)
    return (lease is not None and lease.until > store.now()) or store.read(
        names.session_ref(session)
    ) is not None
