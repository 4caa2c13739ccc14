"""Taking a session for a turn: its lease first, then what was said already, and only then its rows."""

from __future__ import annotations

import time
from dataclasses import dataclass

from engine.errors import SessionNotFound, StaleSession, TenutoError, TurnLost
from serialization.blobs import BlobId
from serialization.manifest import Message
from sessions import salts
from sessions.catalog import Entry
from sessions.names import is_session_id
from sessions.restore import Fallback
from sessions.service.common import Common
from sessions.service.held import Before, Held, in_memory, restore, save_again, settle_id
from sessions.service.place import Place
from sessions.service.residents import Resident, Unsaved
from sessions.session import SaveResult, Session


@dataclass(frozen=True, slots=True)
class Taken:
    """A session whose lease we have, as it is stored, or (`unsaved`) in memory alone; nothing of it was
    restored yet. Whoever takes it ends it with one of `hold`, `keep_stored` and `put_back`."""

    common: Common
    place: Place
    session: Session
    messages: tuple[Message, ...]
    unsaved: Unsaved | None = None

    @property
    def length(self) -> int:
        """Tokens of what was said already."""
        return len(self.unsaved.live.ids) if self.unsaved else self.session.stored().manifest.length

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
        return Held(self.common, self.place, live, in_memory(live, time.perf_counter()), before)

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
    """The session of this id, start of one, or name. Raises SessionNotFound, LeaseHeld; why its
    last turn was lost; TurnLost where the store is behind what rests here, which is forgotten then."""
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
        settle_id(common, place, session.id)  # who waited for the lease has not been told yet
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


def _unsaved(common: Common, place: Place, ref: str) -> Unsaved | None:
    return common.residents.take_unsaved(place.tenant, _id_of(common, place, ref))


def num_unsaved(common: Common, place: Place, ref: str) -> int:
    """1 where the session's last turn is in memory alone, and so has a sequence already; else 0. Raises
    SessionNotFound."""
    return common.residents.num_unsaved_of(place.tenant, _id_of(common, place, ref))


def _id_of(common: Common, place: Place, ref: str) -> str:
    """The id of the session, if it may be one that could not be saved: asked for by its id it is found before
    the store is asked, which may still fail."""
    if is_session_id(ref) or not common.residents.num_unsaved:
        return ref.upper()
    return place.manager.find(ref)


def _stale(stored: Entry) -> StaleSession:
    generation = stored.manifest.generation
    return StaleSession(
        f"session {stored.manifest.session} is at turn {generation}, which is not the one that was expected",
        generation=generation,
    )
