"""One response as it comes to be: what it goes on from, how it is said, and where it is kept."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace

from engine.errors import SessionNotFound
from sessions.service.ask import Ask, ChatMessage, Keep, Own
from sessions.service.backend import Backend
from sessions.service.openai.contents import for_template
from sessions.service.openai.conversation_log import ConversationLog
from sessions.service.openai.naming import new_session, not_found, response_id
from sessions.service.openai.notes import ResponseNote, read_note
from sessions.service.openai.response import Response, stored_response
from sessions.service.openai.response_shapes import InputRequest, ResponseRequest
from sessions.service.told import Begun, Ended, SessionView, Spoken, Told


@dataclass(frozen=True, slots=True)
class Past:
    """What was said before, and the session that has it in store, if one does."""

    messages: tuple[ChatMessage, ...]
    parent: str | None


class Library:
    """The stored responses of one tenant. Every verb blocks."""

    def __init__(self, backend: Backend, tenant: str) -> None:
        self._backend = backend
        self._tenant = tenant
        self.conversations = ConversationLog(backend, tenant)

    def get(self, session: str, param: str | None = None) -> tuple[Response, tuple[ChatMessage, ...]]:
        """A response, and all that was said up to it, without its instructions. Raises SessionNotFound."""
        view, note = self._look(session, param)
        messages = view.messages[1 if note.instructions else 0 : note.messages]
        said = tuple(ChatMessage(message.role, message.text) for message in messages)
        return stored_response(view, note), said

    def delete(self, session: str) -> None:
        """Those that go on from it stay. Raises SessionNotFound."""
        self._look(session, None)
        self._backend.delete(self._tenant, session)

    def past(self, asked: InputRequest) -> Past:
        """Raises SessionNotFound."""
        if asked.previous is not None:
            return Past(self.get(asked.previous, "previous_response_id")[1], asked.previous)
        if asked.conversation_session is not None:
            found = self.conversations.get(asked.conversation_session, "conversation")
            return Past(tuple(for_template(found.messages)), found.note.head)
        return Past((), None)

    def prompt(self, asked: InputRequest, past: Past) -> list[ChatMessage]:
        said = for_template(asked.said())
        system = [ChatMessage("system", asked.instructions)] if asked.instructions else []
        return [*system, *past.messages, *said]

    def _look(self, session: str, param: str | None) -> tuple[SessionView, ResponseNote]:
        try:
            view = self._backend.get(self._tenant, session)
        except SessionNotFound as error:
            raise not_found("resp", response_id(session), param, error) from None
        note = read_note(ResponseNote, view.note)
        if note is None or not _fits(view, note):
            raise not_found("resp", response_id(session), param)
        return view, note


class Answering:
    """One response. `response` is as it stands; what `told` yields is for a turn's thread."""

    def __init__(self, library: Library, backend: Backend, tenant: str, asked: ResponseRequest) -> None:
        """Raises SessionNotFound, UsageError, Unsupported, as far as nothing needs to be looked up for it."""
        self._library = library
        self._backend = backend
        self._tenant = tenant
        self._asked = asked
        self._inputs = asked.said()
        self._prompt: list[ChatMessage] = []
        self.response = Response(
            id=new_session(),
            model=backend.model.name,
            created=int(time.time()),
            instructions=asked.instructions or None,
            previous=asked.previous,
            conversation=asked.conversation_session,
            num_inputs=len(self._inputs),
            settings=asked.settings(),
            store=asked.store is not False,
        )

    def told(self, ask: Ask) -> Iterator[Told]:
        """The turn. At its end the response is stored, and its conversation has it."""
        past = self._library.past(self._asked)
        self._prompt = self._library.prompt(self._asked, past)
        begun: Begun | None = None
        with closing(self._said(ask, past)) as turn:
            for told in turn:
                match told:
                    case Begun():
                        begun = told
                    case Ended():
                        assert begun is not None, "what ends has begun"
                        self._end(begun, told)
                yield told

    def _said(self, ask: Ask, past: Past) -> Generator[Told, None, None]:
        own = Own(self.response.id, self._note) if self.response.store else None
        keep = Keep.SESSION if own is not None else Keep.NOTHING
        turn = self._backend.complete(self._tenant, self._prompt, ask, keep, past.parent, own)
        try:
            first = next(turn)
        except SessionNotFound:
            if self._asked.conversation_session is None:
                raise not_found(
                    "resp", str(self._asked.previous_response_id), "previous_response_id"
                ) from None
            # The response that said the last of it was deleted; the conversation has its text.
            turn = self._backend.complete(self._tenant, self._prompt, ask, keep, None, own)
            first = next(turn)
        with closing(turn):
            yield first
            yield from turn

    def _note(self, begun: Begun, replies: tuple[Spoken, ...]) -> str:
        self.response = self.response.finished(begun, replies[0], int(time.time()))
        return self.response.note(len(self._prompt) + 1).model_dump_json()

    def _end(self, begun: Begun, ended: Ended) -> None:
        if self.response.status is None:
            self.response = self.response.finished(begun, ended.replies[0], int(time.time()))
        if ended.save_error is not None:
            self.response = replace(self.response, store=False)
        response = self.response
        # What was cut off is in no conversation: nobody heard its end.
        if response.conversation is not None and response.status != "cancelled":
            said = (*self._inputs, ChatMessage("assistant", response.text))
            head = response.id if response.store else None
            self._library.conversations.add(response.conversation, said, response.id, head)


def _fits(view: SessionView, note: ResponseNote) -> bool:
    """Whether the session still has what the note says of it."""
    least = note.inputs + 1 + note.instructions
    if not least <= note.messages <= len(view.messages):
        return False
    return view.messages[note.messages - 1].role == "assistant"
