"""A turn of a session: taken, heard, said, saved, and left in memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from engine.errors import LeaseHeld, TenutoError, UsageError
from engine.generation import Cancel
from engine.shared import SharedEngine
from engine.tokenizer import Tokenizer
from serialization.manifest import Message
from serialization.replies import KeptReply
from sessions.live import Live
from sessions.quota import about_nbytes
from sessions.restore import Reason, RestoreResult
from sessions.service.ask import Ask, ChatMessage
from sessions.service.common import Common
from sessions.service.held import MEASURED, Held, settle
from sessions.service.once import is_whole, told_again
from sessions.service.place import Place
from sessions.service.replies import Replies
from sessions.service.stages import Note, Stage
from sessions.service.taken import Taken, num_unsaved, take
from sessions.service.told import Begun, Ended, Spoken, Told
from sessions.session import SaveResult
from sessions.transcript import whole_characters
from sessions.turns import first_of, title_of_all

#: Cells that are kept free for a reply of unknown length, and at most for one of a known one.
REPLY_CELLS = 512
#: Cells for what a template puts around a message.
MESSAGE_CELLS = 16
#: Of a message so much is tokenized to see about how long it is.
SAMPLED_TEXT = 4096

#: Seconds between two looks at whether the session is free.
SHORTEST_PAUSE, LONGEST_PAUSE = 0.03, 0.3


@dataclass(frozen=True, slots=True)
class Change:
    """What a turn does to a conversation before it is heard: it is `prepare`d, and `says` is what is said."""

    says: tuple[Message, ...]
    prepare: Callable[[Live], None]


def turn(common: Common, place: Place, ref: str, ask: Ask, change: Change) -> Generator[Told, None, None]:
    """See `Backend.turn`."""
    common.choosers.check(ask)
    cancel = common.cancel(ask.cancel)
    until, pause = time.monotonic() + common.patience, SHORTEST_PAUSE
    while True:
        settle(common, place, ref)
        has = num_unsaved(common, place, ref)
        with common.admission.turn(cancel, ask.num_replies, has):
            try:
                taken = take(common, place, ref)
            except LeaseHeld:
                if cancel() or time.monotonic() + pause > until:
                    raise
            else:
                yield from _taken(common, taken, ask, cancel, change)
                return
        time.sleep(pause)  # without a place among those that run
        pause = min(1.5 * pause, LONGEST_PAUSE)


def _taken(
    common: Common, taken: Taken, ask: Ask, cancel: Cancel, change: Change
) -> Generator[Told, None, None]:
    try:
        reply = None if ask.once is None else ask.once.kept_in(taken.session)
    except BaseException:
        taken.put_back()
        raise
    expected = ask.expected
    if reply is not None:
        if is_whole(reply, len(taken.messages)):
            yield from _again(taken, reply)
            return
        expected, change = None, REGENERATE
    try:
        room = cells_for(taken.length, change.says, ask, taken.place.engine)
    except BaseException:
        taken.put_back()
        raise
    with common.admission.cells(room, cancel):  # a restore takes them, too
        with ask.watch(Stage.RESTORE) as note:
            held = taken.hold(ask.fallback, expected)
            note_restored(note, held.restored)
        told = yield from _said(common, held, ask, cancel, change, room)
    yield told


def _again(taken: Taken, reply: KeptReply) -> Generator[Told, None, None]:
    session = taken.session
    try:
        spoken = yield from told_again(session.id, taken.messages[reply.message], reply)
    finally:
        saved, error = taken.keep_stored()
    saved = saved or SaveResult(reply.generation, 0, 0, 0.0)
    etag = session.entry.blob if session.entry else None
    yield Ended((spoken,), session.id, etag, None if error else saved, error)


def _said(
    common: Common, held: Held, ask: Ask, cancel: Cancel, change: Change, room: int
) -> Generator[Told, None, Ended]:
    """The turn up to its end, which is returned. It may take `room` cells."""
    live, engine = held.live, held.place.engine
    try:
        opening = _prepared(held, change)
        with held.place.manager.room(_about_stored(held, room)):
            pass  # asked for again, exactly, by the save: but nothing is said that has no room
        complete = heard(common, live, change.says, ask, cancel)
        if ask.sampler is not None:
            engine.set_sampler(live.seq, ask.sampler)
    except BaseException:
        held.leave()
        raise
    replies = Replies(engine, live, ask, common.choosers, cancel)
    try:
        yield Begun(live.session.id, live.told, restored(opening, live.reused))
        if complete:
            with ask.watch(Stage.DECODE) as note, closing(replies.said()) as pieces:
                yield from pieces
                note_said(note, replies.spoken)
    finally:  # also when the reader closes early, or an error ends the reply: nothing said is lost
        with ask.watch(Stage.SAVE) as note:
            concluded = _concluded(held, replies.spoken[0], ask)
            note_saved(note, concluded.saved, concluded.error)
    etag = None if concluded.pending else held.etag()
    return Ended(replies.spoken, live.session.id, etag, concluded.saved, concluded.error, concluded.pending)


@dataclass(frozen=True, slots=True)
class _Concluded:
    saved: SaveResult | None
    error: TenutoError | None
    pending: bool = False


def _concluded(held: Held, spoken: Spoken, ask: Ask) -> _Concluded:
    try:
        held.live.spoke(spoken.text)
        if ask.once is not None:
            ask.once.keep_in(held.session, len(held.live.messages) - 1, spoken.finish)
        held.session.title = held.session.title or title_of_all(held.live.messages)
    except BaseException:
        held.give_up()
        raise
    if held.save_later():
        return _Concluded(None, None, pending=True)
    return _Concluded(*held.save_and_keep())


def note_restored(note: Note, result: RestoreResult) -> None:
    note(reason=result.reason.value, restored_tokens=result.restored, recomputed_tokens=result.recomputed)


def note_said(note: Note, spoken: Sequence[Spoken]) -> None:
    note(reply_tokens=sum(reply.num_tokens for reply in spoken), finish=spoken[0].finish)


def note_saved(note: Note, saved: SaveResult | None, error: TenutoError | None) -> None:
    if saved is not None:
        note(blobs=saved.blobs_written, bytes=saved.bytes_written)
    if error is not None:
        note(error=type(error).__name__)


def heard(common: Common, live: Live, messages: Sequence[Message], ask: Ask, cancel: Cancel) -> bool:
    """`Live.listen`, measured."""
    started, before = time.perf_counter(), live.computed
    with ask.watch(Stage.PREFILL) as note:
        complete = live.listen(messages, cancel)
        note(tokens=live.computed - before)
    if live.computed - before >= MEASURED:
        common.planner.computed(live.computed - before, time.perf_counter() - started)
    return complete


def _prepared(held: Held, change: Change) -> RestoreResult:
    """What the turn had of its past: nothing that was taken back, nor what had to be read again for that."""
    live, opening = held.live, held.restored
    before = live.computed
    change.prepare(live)
    again = live.computed - before
    return replace(
        opening,
        reason=Reason.NO_CHECKPOINT if again and opening.reason is Reason.EXACT else opening.reason,
        restored=min(opening.restored, live.told - again),
        recomputed=opening.recomputed + again,
    )


def restored(opening: RestoreResult, reused: RestoreResult | None) -> RestoreResult:
    """What a turn reused: what its session came with, and what of that its prompt could go on from."""
    if reused is None:
        return opening
    return RestoreResult(
        reused.reason,
        reused.restored,
        reused.recomputed + opening.recomputed,
        opening.seconds + reused.seconds,
        reused.detail or opening.detail,
        opening.draft,
        opening.draft_restored,
    )


def _about_stored(held: Held, cells: int) -> int:
    """About how many bytes a turn will take that comes to so many cells."""
    session = held.session
    return about_nbytes(held.place.engine.layout, session.chunk_tokens, session.synced, cells)


def cells_for(length: int, messages: Sequence[Message], ask: Ask, engine: SharedEngine) -> int:
    """About how many cells a turn may need of a conversation that has `length` tokens."""
    new = sum(_about(message.text, engine.tokenizer) for message in messages)
    reply = REPLY_CELLS if ask.max_tokens is None else min(ask.max_tokens, REPLY_CELLS)
    return min(engine.n_ctx, length + new + reply * ask.num_replies)


def _about(text: str, tokenizer: Tokenizer) -> int:
    """About how many tokens a message has, by how many its beginning has."""
    begins = text[:SAMPLED_TEXT]
    rest = len(text) - len(begins)
    num_tokens = len(tokenizer.encode(begins))
    return MESSAGE_CELLS + num_tokens + (rest * num_tokens // len(begins) if rest else 0)


# --- what turns are of ------------------------------------------------------------------------


def to_say(messages: Sequence[ChatMessage]) -> Change:
    """Messages after those that there are. Raises UsageError for none."""
    said = as_messages(messages)
    if not said:
        raise UsageError("a turn needs a message")
    return Change(said, lambda _: None)


def _take_reply_back(live: Live) -> None:
    if not live.messages or live.messages[-1].role != "assistant":
        raise UsageError("there is no reply that could be said anew")
    live.take_back(len(live.messages) - 1)


#: The last reply is taken back, and nothing new is said.
REGENERATE = Change((), _take_reply_back)


def to_edit(text: str) -> Change:
    """`text` in place of the user's last message."""
    said = Message("user", whole_characters(text), 0, 0)

    def prepare(live: Live) -> None:
        live.take_back(first_of(live.messages, 1))

    return Change((said,), prepare)


def as_messages(messages: Sequence[ChatMessage]) -> tuple[Message, ...]:
    return tuple(Message(each.role, whole_characters(each.text), 0, 0) for each in messages)
