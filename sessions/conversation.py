"""`Conversation`: a chat over one session. Says, streams, keeps ids and text, and saves every turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from engine.errors import StoreError, TenutoError
from engine.reply import Piece
from engine.state import SamplerParams, SeqId
from engine.verbs import Verbs
from serialization.manifest import Message
from sessions.live import Live
from sessions.manager import SessionManager
from sessions.restore import Fallback, RestoreResult
from sessions.session import ExportInfo, Pin, SaveResult, Session, SessionInfo
from sessions.transcript import whole_characters
from sessions.turn_start import TurnStart
from sessions.turns import first_of, title_of


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
        self._engine: Verbs = manager.engine
        messages = session.manifest.messages if session.manifest else ()
        self._live = Live(manager, session, seq, messages, TurnStart(manager.engine))
        self.restored: RestoreResult | None = None
        self.reused: RestoreResult | None = None
        self.saved: SaveResult | None = None
        self.save_error: TenutoError | None = None

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
            chat._live.messages.append(Message("system", whole_characters(system), 0, 0))
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
        if sampler is not None:
            chat._engine.set_sampler(seq, sampler)
        return chat

    # --- talking ------------------------------------------------------------------------------

    def say(self, text: str, ask: Reply | None = None) -> Iterator[Piece]:
        """Add the user's message and stream the reply.

        Closing the iterator early keeps what was said. Raises ContextFull, NoSlot, and then the
        message was not taken.
        """
        ask, text, live = ask or Reply(), whole_characters(text), self._live
        self.reused = None
        complete = live.listen([Message("user", text, 0, 0)], ask.cancel)
        self.reused = live.reused
        self.session.title = self.session.title or title_of(text)
        said: list[str] = []
        try:
            if complete:
                for piece in self._engine.generate(
                    live.seq, max_tokens=ask.max_tokens, stop=ask.stop, cancel=ask.cancel
                ):
                    live.told += piece.token is not None
                    said.append(piece.text)
                    yield piece
        finally:  # also when the reader closes early, or an error ends the reply: nothing said is lost
            live.spoke("".join(said))
            self._autosave()

    def regenerate(self, ask: Reply | None = None) -> Iterator[Piece]:
        """Say the last reply anew. Greedy, or with the seed unchanged, it says the same."""
        return self.edit(self.messages[first_of(self.messages, 1)].text, ask)

    def edit(self, text: str, ask: Reply | None = None) -> Iterator[Piece]:
        """Put `text` in place of the user's last message, and stream the reply to it.

        What cannot be taken (see `say`) leaves the message as it was.
        """
        last = first_of(self.messages, 1)
        ids, messages = self.ids, self.messages
        back = self._live.take_back(last)
        try:
            yield from self.say(text, ask)
        finally:
            if len(self.messages) == last:  # it was not taken
                self._live.put_back(ids, messages)
            elif self.reused is None and back.recomputed:
                self.reused = back

    def rewind(self, turns: int = 1) -> RestoreResult:
        """Take back the last turns, and save. Says what had to be read again for it."""
        result = self._live.take_back(first_of(self.messages, turns))
        self._autosave()
        return result

    def resample(self, sampler: SamplerParams) -> None:
        """Sample otherwise from now on."""
        self._engine.set_sampler(self._live.seq, sampler)

    @property
    def ids(self) -> tuple[int, ...]:
        """All token ids in memory: those fed, and the pending one."""
        return self._live.ids

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(self._live.messages)

    @property
    def session(self) -> Session:
        return self._live.session

    # --- keeping ------------------------------------------------------------------------------

    def save(self) -> SaveResult:
        """Commit the conversation as it stands. Raises StoreError, LeaseLost, StaleSession."""
        self.saved = self._manager.save(self.session, self._live.seq, self._live.messages)
        self.save_error = None
        return self.saved

    def fork(self, name: str | None = None) -> SessionInfo:
        """A new session with this past; this conversation stays where it is."""
        self.save()
        return self._manager.fork(self.session.id, name)

    def pin(self, name: str) -> Pin:
        """Keep this turn under `name`."""
        self.save()
        return self._manager.pin(self.session.id, name)

    def export(self, out: BinaryIO) -> ExportInfo:
        """Write this conversation, as it is in memory, to one archive. Works while the store does not."""
        return self._manager.export_live(self.session, self._live.seq, self._live.messages, out)

    def info(self) -> SessionInfo | None:
        """None before the first save."""
        return self._manager.brief(self.session.id) if self.session.entry else None

    def close(self) -> None:
        """Let go of the sequence and the lease; what is not saved by now is lost."""
        self._engine.close(self._live.seq)
        self.session.close()

    def _autosave(self) -> None:
        try:
            self.save()
        except TenutoError as error:
            self.save_error = error
        except BaseException:
            self.save_error = StoreError("the save was interrupted")
            raise
