"""Conversations: items in order, and some words about them, each a session without a turn of its own.

What is said in one is said in sessions of its responses; here is what it comes to. It changes by one commit
at a time, and who comes second looks again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.errors import LeaseHeld, SessionNotFound, StaleSession
from sessions.service.ask import ChatMessage
from sessions.service.backend import Backend
from sessions.service.openai.items import Item
from sessions.service.openai.naming import conversation_id, item_id, item_of, new_session, not_found
from sessions.service.openai.notes import ConversationNote, Run, read_note
from sessions.service.told import SessionView

#: Seconds for which a change is tried again while others are made.
_PATIENCE = 10.0
_PAUSE = 0.02
_TITLE = "conversation"


@dataclass(frozen=True, slots=True)
class Conversation:
    """One as it stands; `messages` are as many as its note has items."""

    id: str
    created: float
    messages: tuple[ChatMessage, ...]
    note: ConversationNote

    def ids(self) -> list[str]:
        return [item_id(run.base, run.first + at) for run in self.note.items for at in range(run.count)]

    def items(self) -> list[Item]:
        return [
            Item(name, message.role, message.text)
            for name, message in zip(self.ids(), self.messages, strict=True)
        ]

    def item(self, name: str) -> Item:
        """Raises SessionNotFound."""
        for item in self.items():
            if item.id == name:
                return item
        raise SessionNotFound(f"there is no item {name[:80]!r} in {conversation_id(self.id)}")

    def with_more(self, messages: Sequence[ChatMessage], base: str, head: str | None) -> Conversation:
        """With `messages` at its end, whose ids begin with `base`."""
        run = Run(base=base, first=0, count=len(messages))
        note = self.note.model_copy(update={"items": (*self.note.items, run), "head": head})
        return Conversation(self.id, self.created, (*self.messages, *messages), note)

    def without(self, name: str) -> Conversation:
        """Raises SessionNotFound."""
        base, number = item_of(name)
        runs: list[Run] = []
        at, place = None, 0
        for run in self.note.items:
            if run.base == base and run.first <= number < run.first + run.count:
                before = number - run.first
                at = place + before
                runs += _runs(base, (run.first, before), (number + 1, run.count - before - 1))
            else:
                runs.append(run)
            place += run.count
        if at is None:
            raise SessionNotFound(f"there is no item {name[:80]!r} in {conversation_id(self.id)}")
        messages = (*self.messages[:at], *self.messages[at + 1 :])
        return Conversation(
            self.id, self.created, messages, self.note.model_copy(update={"items": tuple(runs)})
        )


def _runs(base: str, *parts: tuple[int, int]) -> list[Run]:
    return [Run(base=base, first=first, count=count) for first, count in parts if count]


class ConversationLog:
    """The conversations of one tenant. Every verb blocks."""

    def __init__(self, backend: Backend, tenant: str) -> None:
        self._backend = backend
        self._tenant = tenant

    def create(self, metadata: dict[str, str], messages: Sequence[ChatMessage]) -> Conversation:
        note = ConversationNote(metadata=metadata, items=(), head=None)
        view = self._backend.create(self._tenant, title=_TITLE, note=note.model_dump_json())
        if not messages:
            return self._read(view)
        return self._change(view.id, lambda now: now.with_more(messages, new_session(), None))

    def get(self, session: str, param: str | None = None) -> Conversation:
        """Raises SessionNotFound."""
        return self._read(self._view(session, param))

    def set_metadata(self, session: str, metadata: dict[str, str]) -> Conversation:
        def changed(now: Conversation) -> Conversation:
            note = now.note.model_copy(update={"metadata": metadata})
            return Conversation(now.id, now.created, now.messages, note)

        return self._change(session, changed)

    def add(
        self, session: str, messages: Sequence[ChatMessage], base: str, head: str | None = None
    ) -> Conversation:
        """Put `messages` at its end, under ids that begin with `base`. `head` is the session that said the
        last of them, where one did."""
        return self._change(session, lambda now: now.with_more(messages, base, head or now.note.head))

    def remove(self, session: str, item: str) -> Conversation:
        return self._change(session, lambda now: now.without(item))

    def delete(self, session: str) -> None:
        """Its responses stay."""
        self.get(session)
        self._backend.delete(self._tenant, session)

    def _change(self, session: str, change: Callable[[Conversation], Conversation]) -> Conversation:
        until = time.monotonic() + _PATIENCE
        while True:
            view = self._view(session)
            then = change(self._read(view))
            note = then.note.model_dump_json()
            try:
                return self._read(self._backend.amend(self._tenant, session, then.messages, note, view.etag))
            except (StaleSession, LeaseHeld):  # somebody else was faster
                if time.monotonic() > until:
                    raise
                time.sleep(_PAUSE)

    def _view(self, session: str, param: str | None = None) -> SessionView:
        try:
            return self._backend.get(self._tenant, session)
        except SessionNotFound as error:
            raise not_found("conv", conversation_id(session), param, error) from None

    def _read(self, view: SessionView) -> Conversation:
        note = read_note(ConversationNote, view.note)
        messages = tuple(ChatMessage(message.role, message.text) for message in view.messages)
        if note is None or sum(run.count for run in note.items) != len(messages):
            raise not_found("conv", conversation_id(view.id))
        return Conversation(view.id, view.created, messages, note)
