"""`Live`: a conversation in an engine's memory, a sequence and the messages whose tokens it has."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from engine.errors import EditRefused, NoChatTemplate, StoreError
from engine.generation import Cancel
from engine.state import Pending, Provenance, SamplerParams, SeqId
from engine.verbs import Verbs
from serialization.manifest import Message
from serialization.replies import replies_before
from serialization.resume import common_prefix
from sessions.drafts import land
from sessions.manager import SessionManager
from sessions.prefix import Hit
from sessions.restore import Reason, RestoreResult, readable
from sessions.session import Session
from sessions.transcript import align, align_tail
from sessions.turn_start import TurnStart
from sessions.turns import after_text, clipped, moved


class Live:
    """Reads what was said, and goes back to where it was not. Saves nothing.

    `seq` changes where the way back leads through the store. `told` counts the ids at hand by its own count:
    a context shift makes the engine's count smaller. `reused` is what the last prompt did, where that is
    worth a line.
    """

    def __init__(
        self,
        manager: SessionManager,
        session: Session,
        seq: SeqId,
        messages: Sequence[Message] = (),
        turn_start: TurnStart | None = None,
    ) -> None:
        """With a `turn_start` each turn begins with a copy, if the model loses rows while it replies. Raises
        NoChatTemplate."""
        self.session = session
        self.seq = seq
        self.messages = list(messages)
        self.reused: RestoreResult | None = None
        #: tokens that were read since it began
        self.computed = 0
        self._manager = manager
        self._engine: Verbs = manager.engine
        self._turn_start = turn_start
        if self._engine.template is None:
            raise NoChatTemplate(
                f"{self._engine.model_name} is a base model without a chat template; "
                "`tenuto run` completes text with it, or give one with --chat-template NAME|FILE"
            )
        self._template = self._engine.template
        self.told = self._start = len(self.ids)
        if not self.told:  # another tokenizer: the text is what there is, and is read at the next turn
            self._clip()

    @property
    def ids(self) -> tuple[int, ...]:
        """All token ids in memory: those fed, and the pending one."""
        edge = self._engine.edge(self.seq)
        pending = (edge.token,) if isinstance(edge, Pending) else ()
        return (*self._engine.tokens(self.seq), *pending)

    @property
    def length(self) -> int:
        """How many ids were fed: all but the pending one."""
        return self._engine.length(self.seq)

    @property
    def shifted(self) -> bool:
        """Whether a context shift dropped ids, so that those at hand are not the whole conversation."""
        return any(span.provenance is Provenance.SHIFTED for span in self._engine.spans(self.seq))

    # --- a turn -------------------------------------------------------------------------------

    def listen(self, messages: Sequence[Message], cancel: Cancel | None = None) -> bool:
        """Add `messages`, and bring the sequence to where the reply to them begins. False when it was
        cancelled on the way. Raises ContextFull, NoSlot, TemplateRefused, and then they were not taken.

        Where each of several begins is not known to the token: all but the last have no place of their own.
        """
        self.reused = None
        before = len(self.messages)
        self.messages += [replace(message, start=self.told, stop=self.told) for message in messages]
        try:
            complete = self._read_prompt(cancel)
        except BaseException:
            del self.messages[before:]
            self.told = len(self.ids)
            raise
        self._start = self.told
        if len(self.messages) > before:
            self.messages[-1] = replace(self.messages[-1], stop=self.told)
        return complete

    def spoke(self, text: str) -> None:
        """The reply ended; `told` was raised by its tokens."""
        self.session.replies = replies_before(self.session.replies, len(self.messages))
        self.messages.append(Message("assistant", text, self._start, self.told))
        self._settle()
        self._engine.mark(self.seq)

    def _settle(self) -> None:
        """Move the messages' spans by what a context shift dropped during the turn."""
        dropped = self.told - len(self.ids)
        if dropped:
            self.messages = moved(self.messages, dropped)
            self.told -= dropped

    def _read_prompt(self, cancel: Cancel | None) -> bool:
        """Bring the sequence to the end of the rendered conversation, feeding only what is new."""
        text, said = after_text(self.messages)
        pieces = self._template.render([{"role": message.role, "content": message.text} for message in said])
        ids, tokenizer = self.ids, self._engine.tokenizer
        if not ids:
            before = () if text is None else tokenizer.encode(text.text)
            return self._begin([*before, *align(before, pieces, tokenizer, len(before)).ids], cancel)
        if self.shifted:
            plan = align_tail(ids, pieces, tokenizer)
        else:
            plan = align(ids, pieces, tokenizer, 0 if text is None else text.stop)
        if plan.kept < len(ids):
            self._cut_back(plan.kept, plan.diverged)
        if self._turn_start is not None:
            self._turn_start.keep(self.seq)
        return self._feed([*self.ids[self._engine.length(self.seq) :], *plan.ids], len(plan.ids), cancel)

    def _feed(self, ids: Sequence[int], new: int, cancel: Cancel | None) -> bool:
        """Feed `ids`, of which the last `new` were never told before."""
        result = self._engine.feed(self.seq, ids, cancel=cancel)
        self.computed += result.computed
        done = result.shared + result.computed
        self.told += done - (len(ids) - new) if done else 0  # what was pending still is
        return done == len(ids)

    def _begin(self, ids: Sequence[int], cancel: Cancel | None) -> bool:
        """The first prompt of a session: share the longest past that memory or the store knows."""
        started = time.perf_counter()
        hit = self._known_prefix(ids)
        restored = 0
        if hit is not None and hit.length > self._engine.known_prefix(ids):
            restored = self._share(hit)
        result = self._engine.feed(self.seq, ids[restored:], cancel=cancel)
        self.computed += result.computed
        shared = restored + result.shared
        self.told = shared + result.computed
        reason = Reason.PREFIX if shared else Reason.NEW
        self.reused = RestoreResult(reason, shared, result.computed, time.perf_counter() - started)
        return self.told == len(ids)

    def _known_prefix(self, ids: Sequence[int]) -> Hit | None:
        try:
            hit = self._manager.known_prefix(ids[:-1])
        except StoreError:  # the turn can be said without it, and its save will tell
            return None
        return hit if hit is not None and hit.length <= self._engine.n_ctx else None

    def _share(self, hit: Hit) -> int:
        """Put the stored rows of another session's equal past under this one. Returns how many."""
        sampler = self._engine.sampler(self.seq)
        state = readable(self._engine, self._manager.store, hit.manifest, hit.length)
        if state is None:  # it was only a hint; the ids are here to be read
            return 0
        self._engine.close(self.seq)
        try:
            self.seq, _ = land(self._engine, replace(state, sampler=sampler))
        except BaseException:
            self.seq = self._engine.create(sampler)
            raise
        return hit.length

    def _cut_back(self, kept: int, diverged: int | None) -> None:
        started = time.perf_counter()
        recomputed, _ = self.go_to(kept)
        self._clip()
        if diverged is not None:
            self.reused = RestoreResult(
                Reason.TEMPLATE_DIVERGED,
                kept - recomputed,
                recomputed,
                time.perf_counter() - started,
                f"the chat template no longer says what was said from token {diverged:,} on",
            )

    # --- going back ---------------------------------------------------------------------------

    def take_back(self, index: int) -> RestoreResult:
        """Drop messages from `index` on, and the ids that came with them. Raises EditRefused."""
        started = time.perf_counter()
        if self.shifted:
            raise EditRefused("a context shift dropped earlier turns, so none can be taken back exactly")
        length = self.messages[index].start
        recomputed, detail = self.go_to(length)
        del self.messages[index:]
        reason = Reason.NO_CHECKPOINT if recomputed else Reason.EDITED
        return RestoreResult(reason, length - recomputed, recomputed, time.perf_counter() - started, detail)

    def put_back(self, ids: Sequence[int], messages: Sequence[Message]) -> None:
        """Undo a `take_back`: the same ids again, and the messages that came with them."""
        kept = common_prefix(self.ids, ids)
        self.messages = list(messages)
        if kept < len(self.ids):
            self.go_to(kept)
        rest = [*self.ids[self._engine.length(self.seq) :], *ids[kept:]]
        try:
            if rest:
                self._engine.feed(self.seq, rest[:-1])
                self._engine.set_pending(self.seq, rest[-1])
        finally:
            self.told = len(self.ids)
            self._clip()

    def go_to(self, length: int) -> tuple[int, str]:
        """Cut the ids to the first `length`: in memory, from a copy on the device, or from the store. What
        none can go back to exactly is read again from the nearest checkpoint. The last one is pending.
        Returns how many tokens were read again, and where the others came from, if not from memory."""
        ids, recomputed, detail = self.ids[:length], 0, ""
        sampler = self._engine.sampler(self.seq)
        if ids:
            fed = ids[:-1]
            nearest, detail = self._nearest(fed, sampler)
            self._keep_copy(nearest)
            recomputed = self._read_again(fed[nearest:])
            self._engine.mark(self.seq)  # who says it otherwise once may do so again
            self._engine.set_pending(self.seq, ids[-1])
        else:
            self._start_over(sampler)
        self.told = length
        return recomputed, detail

    def _nearest(self, fed: Sequence[int], sampler: SamplerParams) -> tuple[int, str]:
        """The sequence at the longest prefix of `fed` that memory, the copy or the store can go back to; its
        length, and where it came from. After an error it is empty, and the text is read at the next turn."""
        here = self._engine.last_resumable(self.seq, len(fed))
        stored = 0 if here == len(fed) else self._manager.stored(self.session, fed)
        copy = self._turn_start
        if copy is not None and max(here + 1, stored) <= copy.length <= len(fed) and copy.go_back(self.seq):
            self.session.cut(copy.length)
            return copy.length, "from the copy on the device that was made when the turn began"
        if here >= stored:
            self._engine.rewind(self.seq, here)
            self.session.cut(here)
            return here, ""
        self._keep_copy(0)
        self._engine.close(self.seq)
        try:
            self.seq, there = self._manager.seed(self.session, fed, sampler)
        except BaseException:
            self.seq, self.told = self._engine.create(sampler), 0
            self.session.cut(0)
            self._clip()
            raise
        return there, "from the store" if there else ""

    def _keep_copy(self, length: int) -> None:
        """Of the rows that the turn began with only the first `length` are here."""
        if self._turn_start is not None:
            self._turn_start.cut(length)

    def _read_again(self, missing: Sequence[int]) -> int:
        """Feed what follows the sequence. Returns how many tokens were computed. After an error the sequence
        is shorter, and what is missing of the text is read at the next turn."""
        try:
            computed = self._engine.feed(self.seq, missing).computed
            self.computed += computed
            return computed
        except BaseException:
            self.told = len(self.ids)
            self._clip()
            raise

    def _start_over(self, sampler: SamplerParams) -> None:
        """An empty sequence in place of this one."""
        self._keep_copy(0)
        self._engine.close(self.seq)
        self.seq = self._engine.create(sampler)
        self.session.cut(0)

    def _clip(self) -> None:
        """No message reaches beyond the ids at hand."""
        self.messages = clipped(self.messages, self.told)
