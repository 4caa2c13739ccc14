"""A session that a turn has to itself: its lease, and its sequence in the engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from engine.errors import NoSlot, StoreError, TenutoError
from engine.state import Pending, SeqId
from serialization.blobs import BlobId
from serialization.manifest import Message
from sessions.live import Live
from sessions.names import is_session_id
from sessions.quota import about_nbytes
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

    def save_later(self) -> bool:
        """Have `save_and_keep` done in the background. False where the bounds of that, or its absence, forbid
        it, or where the turn before could not be saved: then it is told how this one fares. Who asks for the
        session meanwhile waits (`settle`)."""
        if self.common.write_back is None or self.before is not None:
            return False
        session, length = self.session, self.live.length
        nbytes = about_nbytes(self.place.engine.layout, session.chunk_tokens, session.synced, length)
        return self.common.write_back.take(
            self.place.tenant, self.session.id, length, nbytes, self.save_unasked
        )

    def save_unasked(self) -> TenutoError | None:
        """`save_and_keep` for nobody who waits: that the turn is lost is told to whoever asks for the session
        next."""
        _, error = self.save_and_keep()
        if error is not None and not isinstance(error, StoreError):  # and so it was given up
            self.common.lost.add(self.place.tenant, self.session.id, error)
        return error

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
    return _held(common, unsaved).save_and_keep()


def save_again_unasked(common: Common, unsaved: Unsaved) -> None:
    """The same, asked for by nobody. See `Held.save_unasked`."""
    _held(common, unsaved).save_unasked()


def _held(common: Common, unsaved: Unsaved) -> Held:
    return Held(common, unsaved.place, unsaved.live, in_memory(unsaved.live, time.perf_counter()))


def settle(common: Common, place: Place, ref: str) -> None:
    """Wait until the session's last turn is stored, or known not to be. Raises why it was lost."""
    session = _written_back(common, place, ref)
    if session is not None:
        settle_id(common, place, session)


def settle_id(common: Common, place: Place, session: str) -> None:
    """The same of the session of this id."""
    if common.write_back is not None:
        common.write_back.stored(place.tenant, session)
    common.lost.tell(place.tenant, session)


def wait_until_stored(common: Common, place: Place, ref: str) -> None:
    """The same for who is only looking: nothing is raised."""
    session = _written_back(common, place, ref)
    if session is not None and common.write_back is not None:
        common.write_back.stored(place.tenant, session)


def _written_back(common: Common, place: Place, ref: str) -> str | None:
    """The id of the session, if it may be written back, or there may be something to tell of it."""
    waits = common.write_back is not None and common.write_back.holds(place.tenant)
    if not waits and not common.lost.holds(place.tenant):
        return None
    if is_session_id(ref):
        return ref.upper()
    try:
        return place.manager.find(ref)
    except TenutoError:  # who goes on from here meets it, too
        return None


def restore(
    common: Common, place: Place, session: Session, fallback: Fallback, *, others_may_follow: bool = False
) -> Held:
    """The session's sequence: the one that rests here, or one with its stored rows, or its tokens read. Where
    `others_may_follow` the one that rests goes on resting, and this is a fork of it."""
    started = time.perf_counter()
    seq = _wake(common, place, session, others_may_follow)
    if seq is not None:
        live = Live(place.manager, session, seq, session.stored().manifest.messages)
        return Held(common, place, live, in_memory(live, started))
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


def in_memory(live: Live, started: float) -> RestoreResult:
    """A restore that was none."""
    seconds = time.perf_counter() - started
    return RestoreResult(Reason.EXACT, live.length, 0, seconds, IN_MEMORY)
