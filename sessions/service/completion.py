"""A stateless call: a whole conversation comes, of which a past may be known, and a reply goes."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from engine.errors import LeaseLost, SessionError, StateError, StoreError, TenutoError, UsageError
from engine.generation import Cancel
from engine.state import SamplerParams
from serialization.blobs import BlobId
from serialization.manifest import Message, Origin
from serialization.resume import common_prefix
from sessions.catalog import Catalog, Entry
from sessions.live import Live
from sessions.restore import Fallback, Reason, RestoreResult
from sessions.service.ask import Ask, Keep, Own
from sessions.service.common import Common
from sessions.service.held import Held, restore, wait_until_stored
from sessions.service.past import Past
from sessions.service.place import Place
from sessions.service.replies import Replies
from sessions.service.residents import Resident
from sessions.service.stages import Stage
from sessions.service.told import Begun, Ended, Spoken, Told
from sessions.service.turns import (
    cells_for,
    heard,
    note_restored,
    note_said,
    note_saved,
    restored,
)
from sessions.session import SaveResult, Session
from sessions.turns import title_of_all


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a stateless call is: see `Backend.complete`."""

    messages: tuple[Message, ...]
    ask: Ask
    keep: Keep
    parent: str | None
    own: Own | None


class NoLease:
    """Of a session that is not stored, or that is only read: nothing can be committed under it."""

    def swap(self, name: str, old: bytes | None, new: bytes | None) -> bool:
        raise LeaseLost("nobody holds this session")

    def close(self) -> None:
        """There is nothing to give back."""


def complete(common: Common, place: Place, past: Past, wanted: Wanted) -> Generator[Told, None, None]:
    """See `Backend.complete`."""
    ask = wanted.ask
    common.choosers.check(ask)
    if not wanted.messages:
        raise UsageError("a conversation needs a message")
    cancel = common.cancel(ask.cancel)
    if wanted.parent is not None:
        wait_until_stored(common, place, wanted.parent)
    with common.admission.turn(cancel, ask.num_replies):
        source = _source(place, past, wanted)
        room = cells_for(0, wanted.messages, ask, place.engine)
        with common.admission.cells(room, cancel):
            yield from _completed(common, place, past, wanted, source, cancel)


def _completed(
    common: Common, place: Place, past: Past, wanted: Wanted, source: Entry | None, cancel: Cancel
) -> Generator[Told, None, None]:
    ask, engine = wanted.ask, place.engine
    with ask.watch(Stage.RESTORE) as note:
        opened = _opened(common, place, source, wanted)
        note_restored(note, opened.restored)
    live = opened.live
    try:
        live.messages = _known(live.messages, wanted.messages)
        complete = heard(common, live, wanted.messages[len(live.messages) :], ask, cancel)
        engine.set_sampler(live.seq, ask.sampler or SamplerParams())
    except BaseException:
        engine.close(live.seq)
        raise
    replies = Replies(engine, live, ask, common.choosers, cancel)
    begun = Begun(None if wanted.own is None else wanted.own.id, live.told, _told(opened, live))
    kept = _Kept(None, None, None, None)
    try:
        yield begun
        if complete:
            with ask.watch(Stage.DECODE) as note, closing(replies.said()) as pieces:
                yield from pieces
                note_said(note, replies.spoken)
    finally:
        cut_off = replies.spoken[0].finish == "cancelled" and wanted.keep is Keep.PAST
        if wanted.keep is Keep.NOTHING:
            engine.forget(live.seq)
        elif cut_off:  # what nobody read to its end nobody goes on from
            engine.close(live.seq)
        else:
            with ask.watch(Stage.SAVE) as note:
                kept = _Keeping(common, place, past, wanted, source, begun, replies.spoken).keep(live)
                note_saved(note, kept.saved, kept.error)
    yield Ended(replies.spoken, kept.session, kept.etag, kept.saved, kept.error)


def _told(opened: Held, live: Live) -> RestoreResult:
    """What was not read now was reused, and all that was counts as read again."""
    found = restored(opened.restored, live.reused)
    reused = max(0, live.told - live.computed - opened.restored.recomputed)
    reason = found.reason
    if reason is Reason.EXACT and reused < opened.restored.restored:
        reason = Reason.PREFIX  # a part of what was stored
    return replace(found, reason=reason, restored=reused, recomputed=live.told - reused)


def _source(place: Place, past: Past, wanted: Wanted) -> Entry | None:
    """The stored turn that the conversation goes on from, if one is known. Raises SessionNotFound, of a
    parent alone."""
    if wanted.parent is None:
        return past.find(wanted.messages)
    catalog = Catalog(place.manager.store)
    return catalog.session(catalog.find(wanted.parent))


def _opened(common: Common, place: Place, source: Entry | None, wanted: Wanted) -> Held:
    """A sequence with the past of `source`, which nobody holds for it; an empty one without, or where the
    past was said with another salt."""
    detail = ""
    if source is not None and source.manifest.salt != place.salt:
        detail = "what it goes on from was said with another cache_salt"
    elif source is not None and 0 < source.manifest.length <= place.engine.n_ctx:
        manifest = source.manifest
        session = Session(
            manifest.session,
            manifest.name,
            manifest.title,
            NoLease(),
            source,
            manifest.forked_from,
            note=manifest.note,
            salt=manifest.salt,
            replies=manifest.replies,
        )
        try:
            place.manager.note_use(manifest)
            stays = wanted.keep is not Keep.PAST or wanted.parent is not None
            return restore(common, place, session, Fallback.RECOMPUTE, others_may_follow=stays)
        except (StateError, StoreError):
            pass  # the text is all here
    session = Session("", None, "", NoLease(), salt=place.salt)
    live = Live(place.manager, session, place.engine.create(wanted.ask.sampler))
    return Held(common, place, live, RestoreResult(Reason.NEW, 0, 0, 0.0, detail))


def _known(have: Sequence[Message], want: Sequence[Message]) -> list[Message]:
    """Of the messages that are wanted those that begin with the ones that are there, at their places. At
    least the last is left to be heard."""
    known: list[Message] = []
    for mine, theirs in zip(have, want[:-1], strict=False):
        if (mine.role, mine.text) != (theirs.role, theirs.text):
            break
        known.append(mine)
    return known


@dataclass(frozen=True, slots=True)
class _Kept:
    session: str | None
    etag: BlobId | None
    saved: SaveResult | None
    error: TenutoError | None


@dataclass(frozen=True, slots=True)
class _Keeping:
    """How a completion is stored: as the next turn of the session that it went on from, where nobody else
    did; else as a session of its own."""

    common: Common
    place: Place
    past: Past
    wanted: Wanted
    source: Entry | None
    begun: Begun
    spoken: tuple[Spoken, ...]

    def keep(self, live: Live) -> _Kept:
        try:
            live.spoke(self.spoken[0].text)
            if (same := self._same(live)) is not None:
                self.place.engine.close(live.seq)
                return _Kept(same.manifest.session, same.blob, None, None)
            saved = self._advance(live) or self._anew(live)
        except BaseException as error:
            live.session.close()
            self.place.engine.close(live.seq)
            if isinstance(error, TenutoError):
                return _Kept(None, None, None, error)
            raise
        with contextlib.suppress(StoreError):
            self.past.add(live.messages, live.session.id)
        session, entry = live.session, live.session.stored()
        resting = self.place.engine.rest(live.seq)
        self.common.residents.put(
            self.place.tenant,
            Resident(self.place.scope, entry, resting, session.synced, session.draft_synced),
        )
        session.close()
        return _Kept(session.id, entry.blob, saved, None)

    def _advance(self, live: Live) -> SaveResult | None:
        """The next turn of the session that it came from; None where that is not for this call to move."""
        source, session = self.source, live.session
        if source is None or session.entry is not source:
            return None
        if self.wanted.keep is not Keep.PAST or self.wanted.parent is not None:
            return None
        if live.messages[: len(source.manifest.messages)] != list(source.manifest.messages):
            return None  # another reply to an earlier message
        try:
            session.lease = self.place.manager.commits.lease(session.id)
            return self.place.manager.save(session, live.seq, live.messages)
        except TenutoError as error:
            session.close()
            if isinstance(error, StoreError):
                raise
            return None

    def _anew(self, live: Live) -> SaveResult:
        """A session of its own. Of a parent's chunks those that it shares are named, not written."""
        manager, source, own = self.place.manager, self.source, self.wanted.own
        before = live.session
        session = manager.create(None, title_of_all(live.messages), None if own is None else own.id)
        live.session = session
        session.note = None if own is None else own.note(self.begun, self.spoken)
        if source is not None and self.wanted.keep is Keep.SESSION:
            length = common_prefix(source.manifest.tokens, self.place.engine.tokens(live.seq))
            session.forked_from = Origin(source.manifest.session, source.blob, length)
            if before.entry is source and before.synced >= before.chunk_tokens:
                self._share(before, session, source)
        return manager.save(session, live.seq, live.messages)

    def _share(self, before: Session, session: Session, source: Entry) -> None:
        try:
            session.entry = self.place.manager.commits.begin(source.manifest, None, source, session.id)
        except (SessionError, StateError):
            return  # it moved on, or is damaged: all is written anew
        session.synced, session.draft_synced = before.synced, before.draft_synced

    def _same(self, live: Live) -> Entry | None:
        """The session that has said just this already, so that it need not be stored twice."""
        if self.wanted.keep is not Keep.PAST:
            return None
        found = self.past.find(live.messages)
        ids = self.place.engine.tokens(live.seq)
        return found if found is not None and found.manifest.tokens == ids else None
