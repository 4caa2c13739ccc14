"""The one way in which a session's ref moves: a manifest is put, and then swapped in under a lease."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

from engine.errors import LeaseHeld, LeaseLost, StaleSession
from serialization.blobs import BlobClass, Store
from serialization.manifest import Manifest, ManifestKind, Origin, manifest_id
from sessions import names, salts
from sessions.catalog import Catalog, Entry
from sessions.copying import copied
from sessions.lease import KeepAlive, acquire
from sessions.prefix import PrefixIndex
from sessions.quota import Room
from sessions.session import Session

#: More than the refs of a new session take, and what its manifest says beyond that of its past.
NEW_SESSION_NBYTES = 4096


class Commits:
    """Commits turns to one store, of one tenant. `seconds` are how long a lease lasts."""

    def __init__(
        self,
        store: Store,
        prefixes: PrefixIndex,
        holder: str,
        tenant: str,
        seconds: float,
        room: Room,
    ) -> None:
        self._store = store
        self._prefixes = prefixes
        self._holder = holder
        self._tenant = tenant
        self._seconds = seconds
        self._room = room
        self._catalog = Catalog(store)

    def lease(self, session: str) -> KeepAlive:
        """Raises LeaseHeld."""
        return KeepAlive(self._store, session, self._holder, self._seconds)

    def take_again(self, session: Session, lost: LeaseLost) -> None:
        """Another lease for one that is over. Raises `lost` while somebody else writes. That nobody wrote
        since is asked by the swap, which names the turn we stand at."""
        session.close()
        try:
            session.lease = self.lease(session.id)
        except LeaseHeld:
            raise lost from None

    def follow(self, session: Session, manifest: Manifest) -> int:
        """Commit `manifest` as the session's next turn; its generation, parent and time are set here. Returns
        its bytes. Raises StaleSession, LeaseLost."""
        return self.commit(session, self.next(session, manifest))

    def next(self, session: Session, manifest: Manifest) -> Manifest:
        entry = session.stored()
        return replace(
            manifest, generation=entry.manifest.generation + 1, parent=entry.blob, updated=self._store.now()
        )

    def commit(self, session: Session, manifest: Manifest) -> int:
        """Put the manifest and swap the ref to it. Returns the manifest's bytes."""
        first = session.entry is None
        if first and session.name is not None:
            self._catalog.take_name(session.name, session.id)
        data = manifest.encode()
        blob = self._store.scoped(session.id).put(BlobClass.MANIFEST, data)
        session.unsure = Entry(names.session_ref(session.id), blob, manifest)
        self.swap(session, blob.encode())
        session.entry, session.unsure = session.unsure, None
        return len(data)

    def make_sure(self, session: Session) -> bool:
        """Learn whether the last commit took place, if its answer was lost: True if it did, and is durable.

        It is asked for by a swap that changes nothing, which the store acknowledges as it does any other;
        under another lease where ours ended meanwhile. Raises StoreError, LeaseLost, and then it is as unsure
        as before.
        """
        unsure = session.unsure
        if unsure is None:
            return False
        value = unsure.blob.encode()
        try:
            there = session.lease.swap(unsure.ref, value, value)
        except LeaseLost as lost:
            self.take_again(session, lost)
            there = session.lease.swap(unsure.ref, value, value)
        if there:
            session.entry, session.synced = unsure, unsure.manifest.length
        session.unsure = None
        return there

    def swap(self, session: Session, new: bytes | None) -> None:
        """Raises StaleSession, LeaseLost; SessionNotFound where the stored turn is gone."""
        old = session.entry.blob.encode() if session.entry else None
        if not session.lease.swap(names.session_ref(session.id), old, new):
            self._catalog.find(session.id)
            raise StaleSession(f"session {session.id} was changed by another writer; nothing was overwritten")

    def begin(self, past: Manifest, name: str | None, source: Entry | None, session: str) -> Entry:
        """Commit `past` as the new `session`, while `source` still stands where it was read. Raises
        StaleSession, SessionExists, QuotaExceeded."""
        if name is not None:
            self._catalog.check_free(name)
        with self._room(self._nbytes(past, source, session)):
            return self._begun(past, name, source, session)

    def _nbytes(self, past: Manifest, source: Entry | None, session: str) -> int:
        """What `begin` writes: the manifest, and rows where each session has its own."""
        copies = source is not None and self._store.scoped(session) is not self._store
        rows = sum(ref.nbytes for ref in past.blobs()) if copies else 0
        return len(past.encode()) + NEW_SESSION_NBYTES + rows

    def _begun(self, past: Manifest, name: str | None, source: Entry | None, session: str) -> Entry:
        own, now = self._store.scoped(session), self._store.now()
        manifest = replace(
            copied(past, self._store, own) if source else past,
            session=session,
            tenant=self._tenant,
            kind=ManifestKind.TURN,
            pin=None,
            name=name,
            generation=1,
            parent=source.blob if source else None,
            forked_from=_origin(past, source),
            note=None,
            salt=salts.of_fork(past, session),
            replies=(),
            created=now,
            updated=now,
        )
        blob = own.put(BlobClass.MANIFEST, manifest.encode())
        guard = source.guard if source else None
        # A name is only kept for a session that is stored, or that somebody is writing to.
        writing = (
            nullcontext() if name is None else acquire(self._store, session, self._holder, self._seconds)
        )
        with writing:
            if name is not None:
                self._catalog.take_name(name, session)
            if not self._store.swap(names.session_ref(session), None, blob.encode(), guard=guard):
                raise StaleSession(f"session {past.session} moved on while it was read; try again")
        self._prefixes.add(manifest, 0)
        return Entry(names.session_ref(session), blob, manifest)


def _origin(past: Manifest, source: Entry | None) -> Origin | None:
    """The session that `past` is of. What comes from another system was no session before: its manifest tells
    otherwise where it was brought from."""
    if source is None and past.brought is not None:
        return None
    blob = source.blob if source else manifest_id(past.encode())
    return Origin(past.session, blob, past.length)
