"""`SessionManager`: named conversations over an engine and a store.

A save, in one straight line: snapshot what is new -> encode -> put each blob -> put the manifest ->
swap the session's ref, guarded by the lease. The swap is the only commit.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import BinaryIO

from engine.errors import (
    ConfigError,
    EditRefused,
    LeaseLost,
    QuotaExceeded,
    SessionNotFound,
    StaleSession,
    StateError,
    StoreError,
    StoreUnavailable,
)
from engine.state import Provenance, SamplerParams, SeqId
from engine.verbs import Verbs
from serialization.archive import archive_nbytes, read_archive
from serialization.blobs import BlobClass, BlobId, Store
from serialization.manifest import Manifest, Message
from serialization.resume import cut
from serialization.snapshot import verify_kept
from sessions import names, salts
from sessions.catalog import Catalog, Entry
from sessions.check import CheckReport, check_store, repair_store
from sessions.commits import Commits
from sessions.gc import GcPlan, GcResult, collect, free, plan_gc
from sessions.listing import Page, Usage, list_page, list_sessions, read_info, usage
from sessions.pins import Pins
from sessions.policy import Policy
from sessions.prefix import Hit, PrefixIndex
from sessions.quota import Quota
from sessions.reduce import bare, before, imported, tombstone
from sessions.restore import Fallback, RestoreResult, restore, seed, stored_prefix
from sessions.saving import export, export_turn, stands, write_turn
from sessions.session import ExportInfo, Pin, SaveResult, Session, SessionInfo
from sessions.turns import first_of
from sessions.uses import note_use

#: How often a save is tried again when it took so long that gc might have met its blobs.
_SLOW_SAVE_TRIES = 3


class SessionManager:
    """Create, open, save, resume, fork, rewind, list, delete, pin, export, import, check, gc.

    Verbs that write take the session's lease (LeaseHeld names its holder) and commit by one guarded
    swap, so that two writers never merge in silence. Only `save` and `resume` need the engine.
    """

    def __init__(
        self,
        store: Store,
        engine: Verbs | None = None,
        policy: Policy | None = None,
        holder: str | None = None,
        tenant: str = "default",
        salt: str | None = None,
        quota: Quota | None = None,
    ) -> None:
        """Prefixes are shared by the tenant's sessions that have the same `salt` (see `salts`). Managers of
        one tenant share a `quota`; by default it is one of its own, as the policy says."""
        self.store = store
        self.policy = policy or Policy()
        self.tenant = tenant
        self.salt = salt
        self._engine = engine
        self._holder = holder or f"pid {os.getpid()} on {socket.gethostname()}"
        self._catalog = Catalog(store)
        self._quota = quota or Quota(store, self.policy.quota)
        self._pins = Pins(store, self.room)
        self._prefixes = PrefixIndex(store, tenant, salt)
        self.commits = Commits(store, self._prefixes, self._holder, tenant, self.policy.lease, self.room)

    def salted(self, engine: Verbs, salt: str | None) -> SessionManager:
        """The manager of the same sessions, for turns that are asked with another salt."""
        return SessionManager(self.store, engine, self.policy, self._holder, self.tenant, salt, self._quota)

    @property
    def engine(self) -> Verbs:
        if self._engine is None:
            raise ConfigError("this needs a model: the session manager was opened without an engine")
        return self._engine

    @contextmanager
    def room(self, nbytes: int) -> Iterator[None]:
        """Room for `nbytes` under the tenant's quota, for as long as the block takes. Where there is none and
        the policy has a budget, sessions least recently used give up rows first. Raises QuotaExceeded."""
        with ExitStack() as granted:
            try:
                granted.enter_context(self._quota.room(nbytes))
            except QuotaExceeded:
                if self.policy.budget is None or not self._quota.may_free():
                    raise
                with suppress(StateError):  # nothing is given up on a guess, and that is not what was asked
                    free(
                        self.store, self.policy, self._quota.missing(nbytes), self._delete, self._release_rows
                    )
                self._quota.forget()
                granted.enter_context(self._quota.room(nbytes))
            yield

    # --- open ---------------------------------------------------------------------------------

    def create(self, name: str | None = None, title: str = "", session: str | None = None) -> Session:
        """A new session, leased; its id is a new one, unless it is given. Nothing but its name is stored
        before its first save, and that is free again when the lease ends. Raises SessionExists."""
        if name is not None:
            self._catalog.check_free(name)
        session = session or names.new_session_id()
        lease = self.commits.lease(session)
        try:
            if name is not None:
                self._catalog.take_name(name, session)
        except BaseException:
            lease.close()
            raise
        return Session(session, name, title, lease, salt=self.salt)

    def open(self, ref: str, known: Entry | None = None) -> Session:
        """The session of this id, unique start of an id, or name. A turn that is `known` is not
        read again, where the session stands at it still. Raises SessionNotFound, LeaseHeld."""
        session = self._catalog.find(ref)
        lease = self.commits.lease(session)
        try:
            entry = self._catalog.session(session, known)
        except BaseException:
            lease.close()
            raise
        stored = entry.manifest
        return Session(
            session,
            stored.name,
            stored.title,
            lease,
            entry,
            stored.forked_from,
            note=stored.note,
            salt=salts.after_turn(stored, self.salt),
            replies=stored.replies,
            brought=stored.brought,
        )

    def find(self, ref: str) -> str:
        """The id that an id, a unique start of one, or a name means. Raises SessionNotFound, NameRefused."""
        return self._catalog.find(ref)

    # --- save and resume ----------------------------------------------------------------------

    def save(
        self, session: Session, seq: SeqId, messages: Sequence[Message], expected: int | None = None
    ) -> SaveResult:
        """Commit the sequence as the session's next generation; only what is new is written.

        A lease that ended is taken again, if nobody has it now and the session is where we left it.
        Raises StaleSession when the session is not at `expected` (by default, where the handle
        stands), LeaseLost, QuotaExceeded (before a byte is written), StoreFull, StoreUnavailable; what is
        stored is then the old turn.
        """
        if expected is not None and expected != session.generation:
            raise StaleSession(f"session {session.id} is at turn {session.generation}, not {expected}")
        with ExitStack() as granted:
            return self._save(session, seq, messages, lambda n: granted.enter_context(self.room(n)))

    def _save(
        self, session: Session, seq: SeqId, messages: Sequence[Message], ask: Callable[[int], object]
    ) -> SaveResult:
        begun = time.monotonic()
        if self.commits.make_sure(session) and stands(self.engine, seq, messages, session):
            return SaveResult(session.generation, 0, 0, time.monotonic() - begun)
        for _ in range(_SLOW_SAVE_TRIES):
            started = time.monotonic()
            turn = write_turn(self.store, self.engine, session, seq, messages, self.policy, self.tenant, ask)
            if time.monotonic() - started < self.policy.grace / 2:
                break  # gc spares blobs younger than its grace, so all of these are still there
        else:
            raise StoreUnavailable("the store is so slow that gc might delete a turn while it is written")
        known, manifest = session.synced, turn.manifest
        try:
            nbytes = self.commits.commit(session, manifest)
        except LeaseLost as lost:
            self.commits.take_again(session, lost)
            nbytes = self.commits.commit(session, manifest)
        session.synced, session.draft_synced = len(manifest.tokens), turn.draft_synced
        with suppress(StoreError):  # only a hint, and the turn is committed
            self._prefixes.add(manifest, known)
        self.note_use(manifest)
        nbytes += turn.nbytes
        return SaveResult(manifest.generation, turn.num_blobs + 1, nbytes, time.monotonic() - begun)

    def resume(self, session: Session, fallback: Fallback = Fallback.REFUSE) -> tuple[SeqId, RestoreResult]:
        """A live sequence where the session stopped. Raises StateError unless told to recompute."""
        if session.manifest is None:
            raise SessionNotFound(f"session {session.id} was never saved")
        seq, result = restore(self.engine, self.store, session.manifest, self.policy, fallback)
        self.note_use(session.manifest)
        session.synced, session.draft_synced = result.restored, result.draft_restored
        return seq, result

    def note_use(self, manifest: Manifest) -> None:
        """The session is in use now, which puts off the end of its time. That it could not be noted is told
        nowhere: it is a hint."""
        with suppress(StoreError):
            note_use(self.store, manifest, self.policy.touch_every)

    def seed(self, session: Session, tokens: Sequence[int], sampler: SamplerParams) -> tuple[SeqId, int]:
        """A live sequence with as many of `tokens` as the session's stored rows can give; the count too."""
        seq, session.synced, session.draft_synced = seed(
            self.engine, self.store, session.manifest, tokens, sampler
        )
        return seq, session.synced

    def stored(self, session: Session, tokens: Sequence[int]) -> int:
        """How many of `tokens` the session's stored rows could give."""
        return stored_prefix(self.engine, session.manifest, tokens)

    def known_prefix(self, tokens: Sequence[int]) -> Hit | None:
        """The longest stored past of `tokens`, of any session, that this engine could go on from."""
        return self._prefixes.find(self.engine.fingerprint, tokens)

    # --- verbs on stored sessions -------------------------------------------------------------

    def fork(self, ref: str, name: str | None = None, length: int | None = None) -> SessionInfo:
        """A new session with the same past, or its first `length` tokens; no row is copied."""
        entry = self._catalog.session(self._catalog.find(ref))
        past = entry.manifest if length is None else cut(entry.manifest, length)
        return self._begun(past, name, entry)

    def rewind(self, ref: str, turns: int = 1) -> SessionInfo:
        """Take back the last `turns` turns; a turn begins with a message of the user.

        Raises UsageError when there are fewer, EditRefused after a context shift.
        """
        session = self.open(ref)
        try:
            entry = session.stored()
            if any(span.provenance is Provenance.SHIFTED for span in entry.manifest.spans):
                raise EditRefused(f"session {session.id}: a context shift dropped earlier turns")
            past = before(entry.manifest, first_of(entry.manifest.messages, turns))
            self.commits.follow(session, past)
        finally:
            session.close()
        return self.brief(session.id)

    def rename(self, ref: str, name: str | None) -> SessionInfo:
        """Give the session another name, or none. Raises SessionExists."""
        session = self.open(ref)
        try:
            entry = session.stored()
            if name is not None:
                self._catalog.take_name(name, session.id)
            self.commits.follow(session, replace(entry.manifest, name=name))
            if session.name is not None and session.name != name:
                self._catalog.drop_name(session.name, session.id)
        finally:
            session.close()
        return self.brief(session.id)

    def delete(self, ref: str, at: BlobId | None = None) -> None:
        """Forget the session; gc takes its bytes. A tombstone keeps a rebuilt index from reviving it. Raises
        StaleSession unless it stands at the turn `at`, where one is given."""
        self._delete(ref, at)

    def _delete(self, ref: str, at: BlobId | None) -> None:
        session = self.open(ref)
        try:
            self.delete_open(session, at)
        finally:
            session.close()

    def delete_open(self, session: Session, at: BlobId | None = None) -> None:
        """`delete` of a session that is open, and is closed by its holder after. A lease that ended is taken
        again, as for a save."""
        self.commits.make_sure(session)
        entry = session.stored(at)
        tomb = self.commits.next(session, tombstone(entry.manifest))
        self.store.scoped(session.id).put(BlobClass.MANIFEST, tomb.encode())
        try:
            self.commits.swap(session, None)
        except LeaseLost as lost:
            self.commits.take_again(session, lost)
            self.commits.swap(session, None)
        if session.name:
            self._catalog.drop_name(session.name, session.id)

    def release_rows(self, ref: str) -> SessionInfo:
        """Give up the session's rows; ids and text stay, and the next resume reads them again."""
        return self.brief(self._release_rows(ref, None))

    def _release_rows(self, ref: str, at: BlobId | None) -> str:
        session = self.open(ref)
        try:
            self.commits.follow(session, bare(session.stored(at).manifest))
        finally:
            session.close()
        return session.id

    # --- pins ---------------------------------------------------------------------------------

    def pin(self, ref: str, name: str) -> Pin:
        """Keep the session's newest turn under `name`, out of reach of gc and TTL."""
        return self._pins.add(self._catalog.session(self._catalog.find(ref)), name)

    def repin(self, ref: str, name: str) -> Pin:
        """The same in place of what is kept under that name."""
        return self._pins.replace(self._catalog.session(self._catalog.find(ref)), name)

    def pins(self) -> list[Pin]:
        return self._pins.list()

    def load(self, name: str) -> SessionInfo:
        """A new session that goes on from a pin."""
        entry = self._catalog.pin(name)
        return self._begun(entry.manifest, None, entry)

    def unpin(self, name: str) -> None:
        self._pins.remove(name)

    # --- looking ------------------------------------------------------------------------------

    def list(self) -> list[SessionInfo]:
        """Every session, the newest first. All of the store is gone through."""
        return list_sessions(self.store, self.policy)

    def page(self, most: int, after: str | None = None) -> Page:
        """At most so many sessions, those begun last first, without their bytes; with `after` those begun
        before the session of that id. No more than those are read."""
        return list_page(self.store, self.policy, most, after)

    def unreadable(self) -> Mapping[str, StateError]:
        """The refs of sessions and pins whose manifest is damaged or gone, which no list shows."""
        return self._catalog.unreadable()

    def brief(self, ref: str) -> SessionInfo:
        """The session without its bytes. Raises SessionNotFound."""
        return read_info(self.store, self.policy, self._catalog.find(ref))

    def info(self, ref: str) -> SessionInfo:
        """The session with its bytes, for which all of the store is gone through. Raises SessionNotFound."""
        session = self._catalog.session(self._catalog.find(ref)).manifest.session
        for info in self.list():
            if info.id == session:
                return info
        raise SessionNotFound(f"there is no session {session} any more")

    def latest(self) -> SessionInfo | None:
        return next(iter(self.list()), None)

    def manifest(self, ref: str) -> Manifest:
        return self._catalog.session(self._catalog.find(ref)).manifest

    def usage(self) -> Usage:
        return usage(self.store)

    # --- moving, checking, collecting ---------------------------------------------------------

    def export(self, ref: str, out: BinaryIO) -> ExportInfo:
        """Write the session as one `.tenuto` archive."""
        return export(out, self.manifest(ref), self.store)

    def export_live(
        self, session: Session, seq: SeqId, messages: Sequence[Message], out: BinaryIO
    ) -> ExportInfo:
        """Write a live conversation as one archive without touching the store."""
        return export_turn(out, self.engine, session, seq, messages, self.policy, self.tenant)

    def import_(self, source: BinaryIO, name: str | None = None) -> SessionInfo:
        """A new session from an archive: see `take_in`."""
        return self.brief(self.take_in(source, name).manifest.session)

    def take_in(self, source: BinaryIO, name: str | None = None) -> Entry:
        """A new session from an archive; it appears only after the whole archive was verified.

        Its rows are this session's alone: who computed them is not known, so no other may share them.
        """
        if name is not None:
            self._catalog.check_free(name)
        started, session = time.monotonic(), names.new_session_id()
        with ExitStack() as granted:
            manifest = read_archive(
                source,
                self.store.scoped(session),
                lambda announced: granted.enter_context(self.room(archive_nbytes(announced))),
            )
            if time.monotonic() - started >= self.policy.grace / 2:
                verify_kept(self.store, manifest)  # gc might have met the first of them
            return self.commits.begin(imported(manifest), name, None, session)

    def check(self) -> CheckReport:
        """Read everything and tell what is wrong; changes nothing."""
        return check_store(self.store)

    def repair(self) -> CheckReport:
        """Rebuild a damaged index from the manifests; give up damaged rows, keep their text."""
        return repair_store(self.store, self._prefixes, self._holder)

    def plan_gc(self) -> GcPlan:
        return plan_gc(self.store, self.policy)

    def collect(self, plan: GcPlan) -> GcResult:
        return collect(self.store, self.policy, plan, self._delete, self._release_rows)

    def _begun(self, past: Manifest, name: str | None, source: Entry) -> SessionInfo:
        session = names.new_session_id()
        self.commits.begin(past, name, source, session)
        return self.brief(session)
