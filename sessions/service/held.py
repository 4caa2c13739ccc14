"""A session that a turn has to itself: its lease, and its sequence in the engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from engine.errors import NoSlot, SessionNotFound, StaleSession, StoreError, TenutoError, TurnLost
from engine.state import Pending, SeqId
from serialization.blobs import BlobId
from serialization.manifest import Message
from sessions import salts
from sessions.catalog import Entry
from sessions.live import Live
from sessions.names import is_session_id
from sessions.restore import Fallback, Reason, RestoreResult
from sessions.saving import stands
from sessions.service.common import Common
from sessions.service.place import Place
from sessions.service.planner import Estimate, nbytes_of
from sessions.service.residents import Resident, Unsaved
from sessions.session import SaveResult, Session

#: Of a restore that asked no store.
IN_MEMORY = "in memory"
#: Fewer tokens say nothing about how fast they are read.
MEASURED = 32


@dataclass(frozen=True, slots=True)
class Before:
    """What a conversation was, when it was taken from those that could not be saved."""

    ids: tuple[int, ...]
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """`live` and how it came to be there. Whoever takes it ends it with one of `save_and_keep`, `keep`,
    `leave` and `give_up`."""

    common: Common
    place: Place
    live: Live
    restored: RestoreResult
    before: Before | None = None

    @property
    def session(self) -> Session:
        return self.live.session

    def etag(self) -> BlobId | None:
        return self.session.entry.blob if self.session.entry else None

    def leave(self) -> None:
        """Nothing came of it: let it be as it was when it was taken, in memory or stored."""
        if self.before is not None:
            try:
                self.live.put_back(self.before.ids, self.before.messages)
            finally:
                self._stay()
        elif stands(self.place.engine, self.live.seq, self.live.messages, self.session):
            self.keep()
        else:
            self.give_up()

    def save_and_keep(self) -> tuple[SaveResult | None, TenutoError | None]:
        """Commit the turn, give the lease back, and let the sequence rest. Where the store fails the session
        stays held, in memory; where another writer came between, it is given up."""
        live = self.live
        try:
            saved = self.place.manager.save(self.session, live.seq, live.messages)
        except StoreError as error:
            self._stay()
            return None, error
        except TenutoError as error:
            self.give_up()
            return None, error
        except BaseException:
            self._stay()
            raise
        self.keep()
        return saved, None

    def keep(self) -> None:
        """Everything is saved: rest until the next turn."""
        session, place = self.session, self.place
        assert session.entry is not None, "what was never saved cannot rest"
        resting = place.engine.rest(self.live.seq)
        resident = Resident(place.scope, session.entry, resting, session.synced, session.draft_synced)
        self.common.residents.put(place.tenant, resident)
        session.close()

    def _stay(self) -> None:
        self.common.residents.put_unsaved(Unsaved(self.place, self.live))

    def give_up(self) -> None:
        """Let go of all; what is stored is the turn before."""
        self.place.engine.close(self.live.seq)
        self.session.close()


def save_again(common: Common, unsaved: Unsaved) -> tuple[SaveResult | None, TenutoError | None]:
    """Try once more to save what could not be saved. See `Held.save_and_keep`."""
    live = unsaved.live
    return Held(common, unsaved.place, live, _in_memory(live, time.perf_counter())).save_and_keep()


@dataclass(frozen=True, slots=True)
class Taken:
    """A session whose lease we have, as it is stored, or (`unsaved`) in memory alone; nothing of it was
    restored yet. Whoever takes it ends it with one of `hold`, `keep_stored` and `put_back`."""

    common: Common
    place: Place
    session: Session
    messages: tuple[Message, ...]
    unsaved: Unsaved | None = None

    def hold(self, fallback: Fallback, expected: BlobId | None = None) -> Held:
        """The session where it stopped: in memory, or by a restore. Raises StaleSession where it is not at
        `expected`, and what a restore raises; then it was put back."""
        try:
            if expected is not None and self.session.stored().blob != expected:
                raise _stale(self.session.stored())
            if self.unsaved is None:
                return restore(self.common, self.place.of(self.session.salt), self.session, fallback)
        except BaseException:
            self.put_back()
            raise
        live = self.unsaved.live
        before = Before(live.ids, tuple(live.messages))
        return Held(self.common, self.place, live, _in_memory(live, time.perf_counter()), before)

    def keep_stored(self) -> tuple[SaveResult | None, TenutoError | None]:
        """Nothing is said in it: save what could not be saved yet, and let it be."""
        if self.unsaved is not None:
            return save_again(self.common, self.unsaved)
        self.session.close()
        return None, None

    def put_back(self) -> None:
        """As it was before it was taken."""
        if self.unsaved is not None:
            self.common.residents.put_unsaved(self.unsaved)
        else:
            self.session.close()


def take(common: Common, place: Place, ref: str) -> Taken:
    """The session of this id, start of one, or name. Raises SessionNotFound, LeaseHeld; TurnLost where the
    store is behind what rests here, which is forgotten then."""
    unsaved = _unsaved(common, place, ref)
    if unsaved is not None and unsaved.live.session.salt not in (place.salt, salts.own(unsaved.session)):
        _stored_first(common, unsaved)
        unsaved = None
    if unsaved is not None:
        live = unsaved.live
        return Taken(common, unsaved.place, live.session, tuple(live.messages), unsaved)
    resident = common.residents.look(place.tenant, ref.upper()) if is_session_id(ref) else None
    try:
        session = place.manager.open(ref, None if resident is None else resident.entry)
    except SessionNotFound:
        if resident is not None:
            _forget(common, place, resident)
        raise
    try:
        _refuse_lost(common, place, session)
    except BaseException:
        session.close()
        raise
    return Taken(common, place, session, session.stored().manifest.messages)


def _refuse_lost(common: Common, place: Place, session: Session) -> None:
    """Generations only rise. Where the stored one is not above that of another turn which rests here, and
    was committed, the store went back: a failover to a replica that did not have it yet."""
    stored, resident = session.stored(), common.residents.look(place.tenant, session.id)
    if resident is None or resident.entry.blob == stored.blob:
        return
    known, now = resident.entry.manifest.generation, stored.manifest.generation
    if known >= now:
        _forget(common, place, resident)
        raise TurnLost(
            f"session {session.id} is at turn {now}, though turn {known} was stored: the store lost it (a"
            " failover to a replica without it?). Nothing was said; say again what is missing",
            generation=now,
            lost=known,
        )


def _forget(common: Common, place: Place, resident: Resident) -> None:
    taken = common.residents.take(place.tenant, resident.session)
    if taken is not None:
        place.engine.drop(taken.resting)


def _stored_first(common: Common, unsaved: Unsaved) -> None:
    """Save what is asked for with another salt than it was said with: in memory it lies where others look for
    theirs. Raises what keeps it from being saved, and then it stays."""
    _, error = save_again(common, unsaved)
    if error is not None:
        raise error


def restore(
    common: Common, place: Place, session: Session, fallback: Fallback, *, others_may_follow: bool = False
) -> Held:
    """The session's sequence: the one that rests here, or one with its stored rows, or its tokens read. Where
    `others_may_follow` the one that rests goes on resting, and this is a fork of it."""
    started = time.perf_counter()
    seq = _wake(common, place, session, others_may_follow)
    if seq is not None:
        live = Live(place.manager, session, seq, session.stored().manifest.messages)
        return Held(common, place, live, _in_memory(live, started))
    return _restored(common, place, session, fallback)


def _restored(common: Common, place: Place, session: Session, fallback: Fallback) -> Held:
    manifest, planner, manager = session.stored().manifest, common.planner, place.manager
    estimate = planner.estimate(manifest)
    if planner.passes_over(estimate):
        seq, restored = _read_again(place, session, estimate)
    else:
        seq, restored = manager.resume(session, fallback)
        if restored.reason in (Reason.EXACT, Reason.COMPATIBLE):
            planner.restored(nbytes_of(manifest), restored.seconds)
    if restored.recomputed >= MEASURED and not restored.restored:
        planner.computed(restored.recomputed, restored.seconds)
    try:
        return Held(common, place, Live(manager, session, seq, manifest.messages), restored)
    except BaseException:
        place.engine.close(seq)
        raise


def _read_again(place: Place, session: Session, estimate: Estimate) -> tuple[SeqId, RestoreResult]:
    """The session's tokens read, with what memory knows of them, and none of its stored rows."""
    started, manifest, engine = time.perf_counter(), session.stored().manifest, place.engine
    seq = engine.create(manifest.sampler)
    try:
        fed = engine.feed(seq, manifest.tokens)
        if isinstance(manifest.edge, Pending):
            engine.set_pending(seq, manifest.edge.token)
    except BaseException:
        engine.close(seq)
        raise
    detail = f"its rows would have taken {estimate.restore:.2g} s, its tokens {estimate.recompute:.2g} s"
    seconds = time.perf_counter() - started
    return seq, RestoreResult(Reason.SLOWER, fed.shared, fed.computed, seconds, detail)


def _wake(common: Common, place: Place, session: Session, others_may_follow: bool) -> SeqId | None:
    """The session's sequence, if it rests here at the very turn that is stored; of a session that is nothing
    but a fork so far a fork of the other one's."""
    entry = session.stored()
    origin, resident = entry.manifest.forked_from, common.residents.take(place.tenant, session.id)
    if resident is not None and resident.entry.blob == entry.blob:
        return _woken(common, place, session, resident, others_may_follow)
    if origin is None or entry.manifest.generation > 1:
        return None
    parent = common.residents.look(place.tenant, origin.session)
    if parent is None or parent.entry.blob != origin.manifest:
        return None
    if parent.entry.manifest.tokens != entry.manifest.tokens:
        return None
    parent = common.residents.take(place.tenant, origin.session)
    return None if parent is None else _woken(common, place, session, parent, True)


def _woken(
    common: Common, place: Place, session: Session, resident: Resident, others_may_follow: bool
) -> SeqId | None:
    if resident.scope != place.scope:
        return None
    seq = place.engine.wake(resident.resting)
    if seq is None:
        return None
    session.synced, session.draft_synced = resident.synced, resident.draft_synced
    return _forked(common, place, resident, seq) if others_may_follow else seq


def _forked(common: Common, place: Place, resident: Resident, seq: SeqId) -> SeqId:
    """A fork of `seq`, which goes on resting; where there is no room for two, `seq` itself."""
    try:
        fork = place.engine.fork(seq)
    except NoSlot:
        return seq
    again = replace(resident, resting=place.engine.rest(seq))
    common.residents.put(place.tenant, again)
    return fork


def _unsaved(common: Common, place: Place, ref: str) -> Unsaved | None:
    """What could not be saved is asked for by its id before the store is, which may still fail."""
    if is_session_id(ref):
        return common.residents.take_unsaved(place.tenant, ref.upper())
    if common.residents.num_unsaved:
        return common.residents.take_unsaved(place.tenant, place.manager.find(ref))
    return None


def _in_memory(live: Live, started: float) -> RestoreResult:
    seconds = time.perf_counter() - started
    return RestoreResult(Reason.EXACT, live.length, 0, seconds, IN_MEMORY)


def _stale(stored: Entry) -> StaleSession:
    generation = stored.manifest.generation
    return StaleSession(
        f"session {stored.manifest.session} is at turn {generation}, which is not the one that was expected",
        generation=generation,
    )
