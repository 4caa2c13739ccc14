"""Conversations of the Python API: `Chat` in a thread, `AsyncChat` in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import BinaryIO

from engine.errors import UsageError
from engine.generation import Cancel
from serialization.manifest import Message
from sessions.answer import Answer
from sessions.restore import RestoreResult
from sessions.service.ask import Ask, ChatMessage
from sessions.service.backend import Backend, Turning
from sessions.service.told import SessionView
from sessions.session import ExportInfo


class Opening:
    """A session that is about to be opened, once: `with` gives a `Chat`, `async with` an `AsyncChat`."""

    def __init__(self, open_chat: Callable[[], Chat]) -> None:
        self._open = open_chat
        self._chat: Chat | None = None

    def __enter__(self) -> Chat:
        if self._chat is not None:
            raise UsageError("this block was entered before: ask the manager for the session again")
        self._chat = self._open()
        return self._chat

    def __exit__(self, *_: object) -> None:
        assert self._chat is not None, "what ends has begun"
        self._chat.close()

    async def __aenter__(self) -> AsyncChat:
        return AsyncChat(await asyncio.to_thread(self.__enter__))

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.__exit__)


class Chat:
    """A session, where it stood when it was opened and what was said here since. If another writer came
    between, the next turn raises StaleSession, and nothing is overwritten; `refresh` goes on from there."""

    def __init__(self, backend: Backend, tenant: str, view: SessionView) -> None:
        self._backend = backend
        self._tenant = tenant
        self._view: SessionView | None = view
        self._etag = view.etag
        self._answer: Answer | None = None
        self.id = view.id

    @property
    def view(self) -> SessionView:
        """The session as it is stored. An answer that is not at its end is closed first."""
        self._settle()
        if self._view is None:
            self._view = self._backend.get(self._tenant, self.id)
        return self._view

    @property
    def messages(self) -> tuple[Message, ...]:
        return self.view.messages

    def send(self, text: str, ask: Ask | None = None) -> Answer:
        """Say something, and hear the answer. An answer that is not at its end is closed first."""
        messages = [ChatMessage("user", text)]
        return self._turn(ask, lambda asked: self._backend.turn(self._tenant, self.id, messages, asked))

    def regenerate(self, ask: Ask | None = None) -> Answer:
        """Hear the last answer anew."""
        return self._turn(ask, lambda asked: self._backend.regenerate(self._tenant, self.id, asked))

    def edit(self, text: str, ask: Ask | None = None) -> Answer:
        """Have said `text` in place of what was said last."""
        return self._turn(ask, lambda asked: self._backend.edit(self._tenant, self.id, text, asked))

    def rewind(self, turns: int = 1) -> RestoreResult:
        """Take back the last turns."""
        self._settle()
        view, result = self._backend.rewind(self._tenant, self.id, turns, self._etag)
        self._view, self._etag = view, view.etag
        return result

    def fork(self, name: str | None = None) -> SessionView:
        """Another session with the same past, which is not opened by this."""
        self._settle()
        return self._backend.fork(self._tenant, self.id, name)

    def export(self, out: BinaryIO) -> ExportInfo:
        """Write it to one archive."""
        self._settle()
        return self._backend.export(self._tenant, self.id, out)

    def refresh(self) -> SessionView:
        """Go on from where the session is by now, whoever brought it there."""
        self._settle()
        self._view = self._backend.get(self._tenant, self.id)
        self._etag = self._view.etag
        return self._view

    def close(self) -> None:
        """End an answer that nobody heard to its end, and save what could not be saved yet, or raise why."""
        self._settle()
        if self._backend.load().unsaved:
            self._backend.save(self._tenant, self.id)

    def _turn(self, ask: Ask | None, begin: Callable[[Ask], Turning]) -> Answer:
        ask = ask or Ask()

        def told(gone: Cancel) -> Turning:
            self._settle()  # in the thread that hears it, since it may have to wait
            self._answer = answer
            cancel = gone if ask.cancel is None else either(gone, ask.cancel)
            yield from begin(replace(ask, expected=self._etag, cancel=cancel))

        answer = Answer(told)
        return answer

    def _settle(self) -> None:
        """Close the last answer, and see where the session is after it."""
        if self._answer is None:
            return
        answer, self._answer = self._answer, None
        answer.close()
        if answer.begun is None:
            return
        self._view = None
        if answer.ended is None:  # it was closed early, and does not say where the session is now
            self._etag = self.view.etag
        elif answer.ended.etag is not None:
            self._etag = answer.ended.etag


class AsyncChat:
    """A `Chat` in an event loop: what would block is done in threads."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat

    @property
    def id(self) -> str:
        return self._chat.id

    async def view(self) -> SessionView:
        """See `Chat.view`."""
        return await asyncio.to_thread(lambda: self._chat.view)

    async def messages(self) -> tuple[Message, ...]:
        return (await self.view()).messages

    def send(self, text: str, ask: Ask | None = None) -> Answer:
        """See `Chat.send`."""
        return self._chat.send(text, ask)

    def regenerate(self, ask: Ask | None = None) -> Answer:
        """See `Chat.regenerate`."""
        return self._chat.regenerate(ask)

    def edit(self, text: str, ask: Ask | None = None) -> Answer:
        """See `Chat.edit`."""
        return self._chat.edit(text, ask)

    async def rewind(self, turns: int = 1) -> RestoreResult:
        """See `Chat.rewind`."""
        return await asyncio.to_thread(self._chat.rewind, turns)

    async def fork(self, name: str | None = None) -> SessionView:
        """See `Chat.fork`."""
        return await asyncio.to_thread(self._chat.fork, name)

    async def export(self, out: BinaryIO) -> ExportInfo:
        """See `Chat.export`."""
        return await asyncio.to_thread(self._chat.export, out)

    async def refresh(self) -> SessionView:
        """See `Chat.refresh`."""
        return await asyncio.to_thread(self._chat.refresh)

    async def close(self) -> None:
        """See `Chat.close`."""
        await asyncio.to_thread(self._chat.close)


def either(one: Cancel, other: Cancel) -> Cancel:
    """Asks both."""
    return lambda: one() or other()
