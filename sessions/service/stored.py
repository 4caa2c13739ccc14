"""What is done to stored sessions without a word being said: seen, listed, begun, forked, cut, renamed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.errors import EditRefused, NoSlot, StateError, UsageError
from engine.state import Pending, Provenance, SamplerParams
from serialization.blobs import BlobId
from serialization.manifest import Manifest, ManifestKind, Message
from serialization.replies import replies_before
from serialization.resume import common_prefix, last_resumable
from sessions import names
from sessions.catalog import Catalog, Entry
from sessions.commits import NEW_SESSION_NBYTES
from sessions.reduce import before
from sessions.restore import Reason, RestoreResult
from sessions.service.common import Common
from sessions.service.place import Place
from sessions.service.told import Page, SessionView
from sessions.session import Session
from sessions.turns import first_of

MOST_LISTED = 100
#: Sessions that one call looks at, for those that contain a text.
LOOKED_AT = 1000


class Stored:
    """The stored sessions of one tenant. Writes take the session's lease, and change what rests in memory
    with it."""

    def __init__(self, common: Common, place: Place) -> None:
        self._common = common
        self._place = place
        self._manager = place.manager
        self._store = place.manager.store
        self._catalog = Catalog(self._store)

    def id_of(self, ref: str) -> str:
        """The store is asked for what is no whole id."""
        return ref.upper() if names.is_session_id(ref) else self._catalog.find(ref)

    def entry(self, ref: str) -> Entry:
        return self._catalog.session(self._catalog.find(ref))

    def view(self, entry: Entry) -> SessionView:
        manifest = entry.manifest
        resident = self._common.residents.look(self._place.tenant, manifest.session)
        return SessionView(
            id=manifest.session,
            name=manifest.name,
            title=manifest.title,
            parent=manifest.forked_from.session if manifest.forked_from else None,
            model=manifest.model,
            generation=manifest.generation,
            etag=entry.blob,
            created=manifest.created,
            updated=manifest.updated,
            length=manifest.length,
            messages=manifest.messages,
            sampler=manifest.sampler,
            resident=resident is not None and resident.entry.blob == entry.blob,
            note=manifest.note,
        )

    def list(self, limit: int, after: str | None, containing: str) -> Page:
        """See `Backend.list`. A session whose manifest cannot be read is left out: `check` tells of it."""
        if not 1 <= limit <= MOST_LISTED:
            raise UsageError(f"1 to {MOST_LISTED} sessions can be listed at once", param="limit")
        if after is not None and not names.is_session_id(after):
            raise UsageError("'after' is no session id", param="after")
        last = None if after is None else names.session_ref(after.upper())
        found: list[SessionView] = []
        for _ in range(LOOKED_AT // (limit + 1)):
            refs = self._store.last_refs(names.SESSIONS, last, limit + 1)
            for ref, value in refs:
                try:
                    view = self.view(self._catalog.read_entry(ref, value))
                except StateError:
                    continue  # or it was moved on or deleted since
                if containing.lower() in f"{view.name or ''}\n{view.title}".lower():
                    if len(found) == limit:
                        return Page(tuple(found), found[-1].id)
                    found.append(view)
            if len(refs) <= limit:
                return Page(tuple(found), None)
            last = refs[-1][0]
        return Page(tuple(found), last.removeprefix(names.SESSIONS) if last else None)

    def create(
        self,
        name: str | None,
        system: str | None,
        sampler: SamplerParams | None,
        title: str,
        note: str | None,
    ) -> Entry:
        """An empty session, made without the engine: no sequence is needed for it."""
        engine, session = self._place.engine, self._manager.create(name, title)
        try:
            now = self._store.now()
            manifest = Manifest(
                session=session.id,
                tenant=self._place.tenant,
                name=name,
                title=title,
                kind=ManifestKind.TURN,
                pin=None,
                generation=1,
                parent=None,
                forked_from=None,
                created=now,
                updated=now,
                model=engine.model_name,
                fingerprint=engine.fingerprint,
                template=engine.template.digest if engine.template else None,
                layout=engine.layout,
                tokens=(),
                messages=() if system is None else (Message("system", system, 0, 0),),
                spans=(),
                chunks=(),
                checkpoints=(),
                edge=None,
                sampler=sampler or SamplerParams(),
                note=note,
            )
            with self._manager.room(len(manifest.encode()) + NEW_SESSION_NBYTES):
                self._manager.commits.commit(session, manifest)
            return session.stored()
        finally:
            session.close()

    def fork(self, ref: str, name: str | None, turns_back: int) -> Entry:
        entry = self.entry(ref)
        past = entry.manifest
        if turns_back:
            past = _cut(past, turns_back)
        return self._manager.commits.begin(replace(past, note=None), name, entry, names.new_session_id())

    def load(self, pin: str) -> Entry:
        """A new session that goes on from a pin."""
        entry = self._catalog.pin(pin)
        return self._manager.commits.begin(
            replace(entry.manifest, note=None), None, entry, names.new_session_id()
        )

    def rewind(self, ref: str, turns: int, expected: BlobId | None) -> tuple[Entry, RestoreResult]:
        """Cut the stored turn, by reference, and what rests in memory with it."""

        def cut(entry: Entry) -> Manifest:
            return _cut(entry.manifest, turns)

        old, new = self._write(ref, expected, cut)
        length, there = new.manifest.length, last_resumable(new.manifest, new.manifest.length)
        if self._follow(old, new) or there == length:
            return new, RestoreResult(Reason.EDITED, length, 0, 0.0)
        detail = "it is read again with the next turn"
        return new, RestoreResult(Reason.NO_CHECKPOINT, there, length - there, 0.0, detail)

    def rename(self, ref: str, name: str | None, expected: BlobId | None) -> Entry:
        def renamed(entry: Entry) -> Manifest:
            if name is not None:
                self._catalog.take_name(name, entry.manifest.session)
            return replace(entry.manifest, name=name)

        old, new = self._write(ref, expected, renamed)
        if old.manifest.name is not None and old.manifest.name != name:
            self._catalog.drop_name(old.manifest.name, old.manifest.session)
        self._follow(old, new)
        return new

    def amend(
        self, ref: str, messages: Sequence[Message], note: str | None, expected: BlobId | None
    ) -> Entry:
        """Of the messages those that are as they were keep their places; the ids of others, if they were fed,
        are cut back when the next prompt is laid over them."""

        def amended(entry: Entry) -> Manifest:
            kept = _same(entry.manifest.messages, messages)
            stop = kept[-1].stop if kept else 0
            rest = [replace(message, start=stop, stop=stop) for message in messages[len(kept) :]]
            replies = replies_before(entry.manifest.replies, len(kept))
            return replace(entry.manifest, messages=(*kept, *rest), note=note, replies=replies)

        about = len((note or "").encode()) + sum(len(message.text.encode()) + 64 for message in messages)
        with self._manager.room(about + NEW_SESSION_NBYTES):
            old, new = self._write(ref, expected, amended)
        self._follow(old, new)
        return new

    def delete(self, ref: str, expected: BlobId | None) -> None:
        session = self._catalog.find(ref)
        self._manager.delete(session, expected)
        resident = self._common.residents.take(self._place.tenant, session)
        if resident is not None:
            self._place.engine.drop(resident.resting)

    # --- inside -------------------------------------------------------------------------------

    def _write(
        self, ref: str, expected: BlobId | None, change: Callable[[Entry], Manifest]
    ) -> tuple[Entry, Entry]:
        """The session's turn before and after `change`. Raises StaleSession, LeaseHeld."""
        session: Session = self._manager.open(ref)
        try:
            old = session.stored(expected)
            self._manager.commits.follow(session, change(old))
            return old, session.stored()
        finally:
            session.close()

    def _follow(self, old: Entry, new: Entry) -> bool:
        """Let the sequence that rests at the `old` turn rest at the `new` one. False where none does."""
        residents, tenant = self._common.residents, self._place.tenant
        resident = residents.look(tenant, old.manifest.session)
        if resident is None or resident.entry.blob != old.blob:
            return False
        resident = residents.take(tenant, old.manifest.session)
        if resident is None or not self._cut(resident.entry.manifest, new.manifest):
            return False
        engine, length = self._place.engine, new.manifest.length
        try:
            seq = engine.wake(resident.resting)
        except NoSlot:
            return False
        if seq is None:
            return False
        if engine.length(seq) > length:
            if not length or engine.last_resumable(seq, length) != length:
                engine.close(seq)
                return False
            engine.rewind(seq, length)
            if isinstance(new.manifest.edge, Pending):
                engine.set_pending(seq, new.manifest.edge.token)
        residents.put(
            tenant,
            replace(
                resident,
                entry=new,
                resting=engine.rest(seq),
                synced=min(resident.synced, length),
                draft_synced=min(resident.draft_synced, length),
            ),
        )
        return True

    def _cut(self, old: Manifest, new: Manifest) -> bool:
        """Whether `new` has the first tokens of `old` and no others."""
        return common_prefix(old.tokens, new.tokens) == new.length


def _cut(manifest: Manifest, turns: int) -> Manifest:
    if any(span.provenance is Provenance.SHIFTED for span in manifest.spans):
        raise EditRefused(f"session {manifest.session}: a context shift dropped earlier turns")
    return before(manifest, first_of(manifest.messages, turns))


def _same(have: Sequence[Message], want: Sequence[Message]) -> list[Message]:
    """Of `have` those that `want` begins with."""
    same: list[Message] = []
    for mine, theirs in zip(have, want, strict=False):
        if (mine.role, mine.text) != (theirs.role, theirs.text):
            break
        same.append(mine)
    return same
