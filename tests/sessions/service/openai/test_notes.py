"""What is kept with a session is looked at before it is believed, and ids come from nowhere else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import SessionNotFound
from serialization.limits import MAX_NOTE_NBYTES
from sessions.service.ask import ChatMessage
from sessions.service.openai.conversation_log import Conversation
from sessions.service.openai.naming import (
    conversation_id,
    item_id,
    item_of,
    new_session,
    response_id,
    session_of,
)
from sessions.service.openai.notes import ConversationNote, ResponseNote, Run, Settings, Usage, read_note

ULID = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
SETTINGS = Settings(
    temperature=1.0,
    top_p=1.0,
    max_output_tokens=None,
    top_logprobs=0,
    format="text",
    metadata={"a": "b"},
    user=None,
    prompt_cache_key=None,
    safety_identifier=None,
)
RESPONSE = ResponseNote(
    messages=3,
    inputs=1,
    instructions=True,
    previous=None,
    conversation=ULID,
    created=1,
    completed=2,
    status="completed",
    usage=Usage(input_tokens=5, cached_tokens=3, output_tokens=2),
    settings=SETTINGS,
)
CONVERSATION = ConversationNote(metadata={}, items=(Run(base=ULID, first=0, count=2),), head=None)


def changed(**changes: Any) -> str:
    return json.dumps({**json.loads(RESPONSE.model_dump_json()), **changes})


def test_notes_come_back_as_they_were_and_each_is_of_its_kind() -> None:
    assert read_note(ResponseNote, RESPONSE.model_dump_json()) == RESPONSE
    assert read_note(ConversationNote, CONVERSATION.model_dump_json()) == CONVERSATION
    assert read_note(ConversationNote, RESPONSE.model_dump_json()) is None
    assert read_note(ResponseNote, CONVERSATION.model_dump_json()) is None


@pytest.mark.parametrize(
    "text",
    [
        *(None, "", "{}", "[]", "null", "\ud800", "{" * 1000, "not json"),
        *(changed(kind="conversation"), changed(more=1), changed(messages=0), changed(messages=-1)),
        *(changed(messages="3"), changed(conversation="../x"), changed(previous="x"), changed(status="fine")),
        *(changed(usage={}), changed(settings={}), changed(inputs=-1), changed(instructions=1)),
    ],
)
def test_what_is_no_note_is_none(text: str | None) -> None:
    assert read_note(ResponseNote, text) is None


def test_the_largest_note_of_a_response_has_room() -> None:
    label = "\x01" * 256
    metadata = {f"{at:02d}" + "\x01" * 62: "\x01" * 512 for at in range(16)}
    settings = SETTINGS.model_copy(
        update={"metadata": metadata, "user": label, "prompt_cache_key": label, "safety_identifier": label}
    )
    note = RESPONSE.model_copy(update={"settings": settings})
    assert read_note(ResponseNote, note.model_dump_json()) == note
    assert len(note.model_dump_json().encode()) < MAX_NOTE_NBYTES / 8


def test_a_conversation_of_many_turns_has_room() -> None:
    note = ConversationNote(
        metadata={},
        items=tuple(Run(base=new_session(), first=0, count=2) for _ in range(10_000)),
        head=new_session(),
    )
    assert len(note.model_dump_json()) < MAX_NOTE_NBYTES


def test_ids_are_those_of_sessions_with_a_word_before_them() -> None:
    session = new_session()
    assert session_of("resp", response_id(session)) == session
    assert session_of("conv", conversation_id(session)) == session
    assert item_of(item_id(session, 12)) == (session, 12)
    with pytest.raises(SessionNotFound):
        session_of("conv", response_id(session))
    with pytest.raises(SessionNotFound):
        item_of(f"{item_id(session, 1)}\n")


@given(st.text(max_size=40))
def test_anything_else_is_no_id(text: str) -> None:
    for given_ in (text, f"resp_{text}", f"resp_{ULID}{text[:1] or 'x'}", f"resp_{text}{ULID}"):
        if given_ != f"resp_{ULID}":
            with pytest.raises(SessionNotFound):
                session_of("resp", given_)


@given(st.lists(st.integers(1, 4), max_size=6), st.data())
def test_items_that_are_taken_out_leave_the_others_their_ids(counts: list[int], data: st.DataObject) -> None:
    runs = tuple(Run(base=new_session(), first=0, count=count) for count in counts)
    messages = tuple(ChatMessage("user", str(at)) for at in range(sum(counts)))
    now = Conversation(ULID, 0.0, messages, ConversationNote(metadata={}, items=runs, head=None))
    known = {item.id: item.text for item in now.items()}
    assert len(known) == len(messages)
    while now.messages:
        gone = data.draw(st.sampled_from(now.ids()))
        now = now.without(gone)
        del known[gone]
        assert {item.id: item.text for item in now.items()} == known
        with pytest.raises(SessionNotFound):
            now.without(gone)
        with pytest.raises(SessionNotFound):
            now.item(gone)
