"""A backend that says what it is told to, as slowly as it is told to: for what the real one does not do on
demand. It keeps sessions in memory, and counts one token a word."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from engine.errors import SessionNotFound, StaleSession, TenutoError
from engine.reply import Finish, Piece
from engine.state import SamplerParams
from serialization.blobs import BlobClass, BlobId, blob_id
from serialization.manifest import Message
from sessions.restore import Reason, RestoreResult
from sessions.service.ask import Ask, ChatMessage
from sessions.service.backend import Backend
from sessions.service.told import Begun, Ended, Load, ModelView, Said, SessionView, Spoken, Told
from sessions.session import SaveResult


@dataclass
class Script:
    """What a turn does. `before` is called first, and may raise or wait; each word is preceded by `pause`
    seconds, and `fail` is raised instead of the word after `words`."""

    words: Sequence[str] = ("one ", "two ", "three")
    pause: float = 0.0
    before: Callable[[], None] = lambda: None
    fail: BaseException | None = None
    save_error: TenutoError | None = None


@dataclass
class FakeBackend(Backend):
    script: Script = field(default_factory=Script)
    sessions: dict[tuple[str, str], SessionView] = field(default_factory=dict)
    running: int = 0
    draining: bool = False
    cancelled: threading.Event = field(default_factory=threading.Event)

    @property
    def model(self) -> ModelView:
        return ModelView("fake", 2048, 4, 8192, 260, None, "0")

    def load(self) -> Load:
        return Load(self.running, 0, len(self.sessions), 0, self.draining, None, None)

    def tenants(self) -> Sequence[str]:
        return ()

    def create(
        self,
        tenant: str,
        name: str | None = None,
        system: str | None = None,
        sampler: SamplerParams | None = None,
        title: str = "",
    ) -> SessionView:
        number = len(self.sessions)
        view = SessionView(
            id=f"{number:026d}",
            name=name,
            title=title,
            parent=None,
            model="fake",
            generation=1,
            etag=_etag(number, 1),
            created=time.time(),
            updated=time.time(),
            length=0,
            messages=() if system is None else (Message("system", system, 0, 0),),
            sampler=sampler or SamplerParams(),
            resident=False,
        )
        self.sessions[tenant, view.id] = view
        return view

    def get(self, tenant: str, session: str) -> SessionView:
        try:
            return self.sessions[tenant, session]
        except KeyError:
            raise SessionNotFound(f"there is no session {session}") from None

    def turn(
        self, tenant: str, session: str, messages: Sequence[ChatMessage], ask: Ask | None = None
    ) -> Iterator[Told]:
        ask, script = ask or Ask(), self.script
        self.running += 1
        try:
            script.before()
            view = self.get(tenant, session)
            if ask.expected not in (None, view.etag):
                raise StaleSession(f"session {session} moved on")
            yield Begun(view.id, view.length + 1, RestoreResult(Reason.EXACT, view.length, 0, 0.001))
            text, finish, num_tokens = "", "eos", 0
            for word in script.words:
                time.sleep(script.pause)
                if ask.cancel is not None and ask.cancel():
                    finish = "cancelled"
                    self.cancelled.set()
                    break
                num_tokens += 1
                text += word
                yield Said(0, Piece(num_tokens, word))
            if script.fail is not None:
                raise script.fail
            yield self._end(tenant, view, messages, text, finish, num_tokens)
        finally:
            self.running -= 1

    def _end(
        self,
        tenant: str,
        view: SessionView,
        messages: Sequence[ChatMessage],
        text: str,
        finish: Finish,
        num_tokens: int,
    ) -> Ended:
        spoken = (Spoken(text, finish, num_tokens),)
        if self.script.save_error is not None:
            return Ended(spoken, view.id, view.etag, None, self.script.save_error)
        said = [Message(m.role, m.text, 0, 0) for m in (*messages, ChatMessage("assistant", text))]
        generation = view.generation + 1
        now = replace(
            view,
            generation=generation,
            etag=_etag(int(view.id), generation),
            messages=(*view.messages, *said),
            length=view.length + 1 + num_tokens,
        )
        self.sessions[tenant, view.id] = now
        return Ended(spoken, view.id, now.etag, SaveResult(generation, 2, 100, 0.001), None)


def _etag(number: int, generation: int) -> BlobId:
    return blob_id(BlobClass.MANIFEST, f"{number}/{generation}".encode())
