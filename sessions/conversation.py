"""`Conversation`: a chat over one session. Says, streams, keeps ids and text, and saves every turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import BinaryIO

from engine.errors import EditRefused, NoChatTemplate, StoreError, TenutoError
from engine.reply import Piece
from engine.runner import Engine
from engine.state import Pending, Provenance, SamplerParams, SeqId
from serialization.manifest import Message
from serialization.resume import common_prefix
from sessions.drafts import land
from sessions.manager import SessionManager
from sessions.prefix import Hit
from sessions.restore import Fallback, Reason, RestoreResult, readable
from sessions.session import ExportInfo, Pin, SaveResult, Session, SessionInfo
from sessions.transcript import align, align_tail, whole_characters
from sessions.turn_start import TurnStart
from sessions.turns import clipped, first_of, moved, title_of


@dataclass(frozen=True, slots=True)
class Reply:
    """What to ask of the model for one turn."""

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    cancel: Callable[[], bool] | None = None


class Conversation:
    """One user, one session, one sequence of the engine.

    `restored` tells what the opening reused; `reused` what the last turn did, where that is worth a
    line. Every turn is saved when its reply ends; if that fails the error is in `save_error`, the
    state stays in memory, and each next turn tries again.
    """

    def __init__(self, manager: SessionManager, session: Session, seq: SeqId) -> None:
        self._manager = manager
        self._engine: Engine = manager.engine
        self._session = session
        self._seq = seq
        self._messages: list[Message] = list(session.manifest.messages) if session.manifest else []
        #: ids at hand, by our own count: a context shift makes the engine's count smaller
        self._told = len(self.ids)
        self._start = TurnStart(self._engine)
        self.restored: RestoreResult | None = None
        self.reused: RestoreResult | None = None
        self.saved: SaveResult | None = None
        self.save_error: TenutoError | None = None
        if self._engine.template is None:
            raise NoChatTemplate(
                f"{self._engine.model_name} is a base model without a chat template; "
                "`tenuto run` completes text with it, or give one with --chat-template NAME|FILE"
            )
        self._template = self._engine.template

    @classmethod
    def new(
        cls,
        manager: SessionManager,
        name: str | None = None,
        sampler: SamplerParams | None = None,
        system: str | None = None,
    ) -> Conversation:
        """A new, unsaved conversation. Raises SessionExists, NoSlot."""
        session = manager.create(name)
        try:
            seq = manager.engine.create(sampler or SamplerParams())
            chat = cls(manager, session, seq)
        except BaseException:
            session.close()
            raise
        if system is not None:
            chat._messages.append(Message("system", whole_characters(system), 0, 0))
        return chat

    @classmethod
    def open(
        cls,
        manager: SessionManager,
        ref: str,
        fallback: Fallback = Fallback.REFUSE,
        sampler: SamplerParams | None = None,
    ) -> Conversation:
        """The stored conversation, where it stopped. Raises what `SessionManager.resume` raises."""
        session = manager.open(ref)
        try:
            seq, result = manager.resume(session, fallback)
            chat = cls(manager, session, seq)
        except BaseException:
            session.close()
            raise
        chat.restored = result
        if not chat.ids:  # another tokenizer: the text is what there is, and is read at the next turn
            chat._messages = [replace(message, start=0, stop=0) for message in chat._messages]
        if sampler is not None:
            chat._engine.set_sampler(seq, sampler)
        return chat

    # --- talking ------------------------------------------------------------------------------

    def say(self, text: str, ask: Reply | None = None) -> Iterator[Piece]:
        """Add the user's message and stream the reply.

        Closing the iterator early keeps what was said. Raises ContextFull, NoSlot, and then the
        message was not taken.
        """
        ask, text = ask or Reply(), whole_characters(text)
        self.reused = None
        before = len(self._messages)
        self._messages.append(Message("user", text, self._told, self._told))
        try:
            complete = self._read_prompt(ask)
        except BaseException:
            del self._messages[before:]
            self._told = len(self.ids)
            raise
        start = self._told
        self._session.title = self._session.title or title_of(text)
        self._messages[-1] = replace(self._messages[-1], stop=start)
        said: list[str] = []
        try:
            if complete:
                for piece in self._engine.generate(
                    self._seq, max_tokens=ask.max_tokens, stop=ask.stop, cancel=ask.cancel
                ):
                    self._told += piece.token is not None
                    said.append(piece.text)
                    yield piece
        finally:  # also when the reader closes early, or an error ends the reply: nothing said is lost
            self._messages.append(Message("assistant", "".join(said), start, self._told))
            self._settle()
            self._engine.mark(self._seq)
            self._autosave()

    def regenerate(self, ask: Reply | None = None) -> Iterator[Piece]:
        """Say the last reply anew. Greedy, or with the seed unchanged, it says the same."""
        last = first_of(self._messages, 1)
        return self.edit(self._messages[last].text, ask)

    def edit(self, text: str, ask: Reply | None = None) -> Iterator[Piece]:
        """Put `text` in place of the user's last message, and stream the reply to it.

        What cannot be taken (see `say`) leaves the message as it was.
        """
        last = first_of(self._messages, 1)
        ids, messages = self.ids, self.messages
        back = self._take_back(last)
        try:
            yield from self.say(text, ask)
        finally:
            if len(self._messages) == last:  # it was not taken
                self._put_back(ids, messages)
            elif self.reused is None and back.recomputed:
                self.reused = back

    def rewind(self, turns: int = 1) -> RestoreResult:
        """Take back the last turns, and save. Says what had to be read again for it."""
        result = self._take_back(first_of(self._messages, turns))
        self._autosave()
        return result

    def resample(self, sampler: SamplerParams) -> None:
        """Sample otherwise from now on."""
        self._engine.set_sampler(self._seq, sampler)

    @property
    def ids(self) -> tuple[int, ...]:
        """All token ids in memory: those fed, and the pending one."""
        edge = self._engine.edge(self._seq)
        pending = (edge.token,) if isinstance(edge, Pending) else ()
        return (*self._engine.tokens(self._seq), *pending)

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(self._messages)

    @property
    def session(self) -> Session:
        return self._session

    # --- keeping ------------------------------------------------------------------------------

    def save(self) -> SaveResult:
        """Commit the conversation as it stands. Raises StoreError, LeaseLost, StaleSession."""
        self.saved = self._manager.save(self._session, self._seq, self._messages)
        self.save_error = None
        return self.saved

    def fork(self, name: str | None = None) -> SessionInfo:
        """A new session with this past; this conversation stays where it is."""
        self.save()
        return self._manager.fork(self._session.id, name)

    def pin(self, name: str) -> Pin:
        """Keep this turn under `name`."""
        self.save()
        return self._manager.pin(self._session.id, name)

    def export(self, out: BinaryIO) -> ExportInfo:
        """Write this conversation, as it is in memory, to one archive. Works while the store does not."""
        return self._manager.export_live(self._session, self._seq, self._messages, out)

    def info(self) -> SessionInfo | None:
        """None before the first save."""
        return self._manager.info(self._session.id) if self._session.entry else None

    def close(self) -> None:
        """Let go of the sequence and the lease; what is not saved by now is lost."""
        self._engine.close(self._seq)
        self._session.close()

    # --- inside a turn ------------------------------------------------------------------------

    @property
    def _shifted(self) -> bool:
        """Whether a context shift dropped ids, so that those at hand are not the whole conversation."""
        return any(span.provenance is Provenance.SHIFTED for span in self._engine.spans(self._seq))

    def _settle(self) -> None:
        """Move the messages' spans by what a context shift dropped during the turn."""
        dropped = self._told - len(self.ids)
        if dropped:
            self._messages = moved(self._messages, dropped)
            self._told -= dropped

    def _read_prompt(self, ask: Reply) -> bool:
        """Bring the sequence to the end of the rendered conversation, feeding only what is new.
        False when it was cancelled on the way."""
        pieces = self._template.render(
            [{"role": message.role, "content": message.text} for message in self._messages]
        )
        ids = self.ids
        if not ids:
            return self._begin(align(ids, pieces, self._engine.tokenizer).ids, ask)
        lay = align_tail if self._shifted else align
        plan = lay(ids, pieces, self._engine.tokenizer)
        if plan.kept < len(ids):
            self._cut_back(plan.kept, plan.diverged)
        self._start.keep(self._seq)
        return self._feed([*self.ids[self._engine.length(self._seq) :], *plan.ids], len(plan.ids), ask)

    def _feed(self, ids: Sequence[int], new: int, ask: Reply) -> bool:
        """Feed `ids`, of which the last `new` were never told before."""
        result = self._engine.feed(self._seq, ids, cancel=ask.cancel)
        done = result.shared + result.computed
        self._told += done - (len(ids) - new) if done else 0  # what was pending still is
        return done == len(ids)

    def _begin(self, ids: Sequence[int], ask: Reply) -> bool:
        """The first prompt of a session: share the longest past that memory or the store knows."""
        started = time.perf_counter()
        hit = self._known_prefix(ids)
        restored = 0
        if hit is not None and hit.length > self._engine.known_prefix(ids):
            restored = self._share(hit)
        result = self._engine.feed(self._seq, ids[restored:], cancel=ask.cancel)
        shared = restored + result.shared
        self._told = shared + result.computed
        reason = Reason.PREFIX if shared else Reason.NEW
        self.reused = RestoreResult(reason, shared, result.computed, time.perf_counter() - started)
        return self._told == len(ids)

    def _known_prefix(self, ids: Sequence[int]) -> Hit | None:
        try:
            hit = self._manager.known_prefix(ids[:-1])
        except StoreError:  # the turn can be said without it, and its save will tell
            return None
        return hit if hit is not None and hit.length <= self._engine.n_ctx else None

    def _share(self, hit: Hit) -> int:
        """Put the stored rows of another session's equal past under this one. Returns how many."""
        sampler = self._engine.sampler(self._seq)
        state = readable(self._engine, self._manager.store, hit.manifest, hit.length)
        if state is None:  # it was only a hint; the ids are here to be read
            return 0
        self._engine.close(self._seq)
        try:
            self._seq, _ = land(self._engine, replace(state, sampler=sampler))
        except BaseException:
            self._seq = self._engine.create(sampler)
            raise
        return hit.length

    def _cut_back(self, kept: int, diverged: int | None) -> None:
        started = time.perf_counter()
        recomputed, _ = self._go_to(kept)
        self._clip()
        if diverged is not None:
            self.reused = RestoreResult(
                Reason.TEMPLATE_DIVERGED,
                kept - recomputed,
                recomputed,
                time.perf_counter() - started,
                f"the chat template no longer says what was said from token {diverged:,} on",
            )

    def _take_back(self, index: int) -> RestoreResult:
        """Drop messages from `index` on, and the ids that came with them."""
        started = time.perf_counter()
        if self._shifted:
            raise EditRefused("a context shift dropped earlier turns, so none can be taken back exactly")
        length = self._messages[index].start
        recomputed, detail = self._go_to(length)
        del self._messages[index:]
        reason = Reason.NO_CHECKPOINT if recomputed else Reason.EDITED
        return RestoreResult(reason, length - recomputed, recomputed, time.perf_counter() - started, detail)

    def _go_to(self, length: int) -> tuple[int, str]:
        """Cut the ids to the first `length`: in memory, from a copy on the device, or from the store. What
        none can go back to exactly is read again from the nearest checkpoint. The last one is pending.
        Returns how many tokens were read again, and where the others came from, if not from memory."""
        ids, recomputed, detail = self.ids[:length], 0, ""
        sampler = self._engine.sampler(self._seq)
        if ids:
            fed = ids[:-1]
            nearest, detail = self._nearest(fed, sampler)
            self._start.cut(nearest)
            recomputed = self._read_again(fed[nearest:])
            self._engine.mark(self._seq)  # who says it otherwise once may do so again
            self._engine.set_pending(self._seq, ids[-1])
        else:
            self._start_over(sampler)
        self._told = length
        return recomputed, detail

    def _nearest(self, fed: Sequence[int], sampler: SamplerParams) -> tuple[int, str]:
        """The sequence at the longest prefix of `fed` that memory, the copy or the store can go back to; its
        length, and where it came from. After an error it is empty, and the text is read at the next turn."""
        here = self._engine.last_resumable(self._seq, len(fed))
        stored = 0 if here == len(fed) else self._manager.stored(self._session, fed)
        copied = self._start.length
        if max(here + 1, stored) <= copied <= len(fed) and self._start.go_back(self._seq):
            self._session.cut(copied)
            return copied, "from the copy on the device that was made when the turn began"
        if here >= stored:
            self._engine.rewind(self._seq, here)
            self._session.cut(here)
            return here, ""
        self._start.forget()
        self._engine.close(self._seq)
        try:
            self._seq, there = self._manager.seed(self._session, fed, sampler)
        except BaseException:
            self._seq, self._told = self._engine.create(sampler), 0
            self._session.cut(0)
            self._clip()
            raise
        return there, "from the store" if there else ""

    def _read_again(self, missing: Sequence[int]) -> int:
        """Feed what follows the sequence. Returns how many tokens were computed. After an error the sequence
        is shorter, and what is missing of the text is read at the next turn."""
        try:
            return self._engine.feed(self._seq, missing).computed
        except BaseException:
            self._told = len(self.ids)
            self._clip()
            raise

    def _start_over(self, sampler: SamplerParams) -> None:
        """An empty sequence in place of this one."""
        self._start.forget()
        self._engine.close(self._seq)
        self._seq = self._engine.create(sampler)
        self._session.cut(0)

    def _clip(self) -> None:
        """No message reaches beyond the ids at hand."""
        self._messages = clipped(self._messages, self._told)

    def _put_back(self, ids: Sequence[int], messages: Sequence[Message]) -> None:
        """Undo a `_take_back`: the same ids again, and the messages that came with them."""
        kept = common_prefix(self.ids, ids)
        self._messages = list(messages)
        if kept < len(self.ids):
            self._go_to(kept)
        rest = [*self.ids[self._engine.length(self._seq) :], *ids[kept:]]
        try:
            if rest:
                self._engine.feed(self._seq, rest[:-1])
                self._engine.set_pending(self._seq, rest[-1])
        finally:
            self._told = len(self.ids)
            self._clip()

    def _autosave(self) -> None:
        try:
            self.save()
        except TenutoError as error:
            self.save_error = error
        except BaseException:
            self.save_error = StoreError("the save was interrupted")
            raise
