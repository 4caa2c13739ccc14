"""What is kept with a session that is a response or a conversation: its note, as JSON.

A note is looked at before it is believed: a session may have been imported, or written to by another build.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sessions.service.openai.fields import Label, Metadata

Ulid = Annotated[str, Field(pattern=r"^[0-7][0-9A-HJKMNP-TV-Z]{25}$")]
Count = Annotated[int, Field(ge=0, le=2**31)]
Status = Literal["completed", "incomplete", "cancelled"]


class _Note(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Settings(_Note):
    """How a response was asked for, to be said again."""

    temperature: float
    top_p: float
    max_output_tokens: int | None
    top_logprobs: int
    format: Literal["text", "json_object"]
    metadata: Metadata
    user: Label | None
    prompt_cache_key: Label | None
    safety_identifier: Label | None


class Usage(_Note):
    input_tokens: Count
    cached_tokens: Count
    output_tokens: Count


class ResponseNote(_Note):
    """Of the session's first `messages` the last is the reply, and before it are `inputs` of this response;
    where there are `instructions` the very first are those. The rest is what came before."""

    kind: Literal["response"] = "response"
    messages: Annotated[int, Field(ge=1, le=2**16)]
    inputs: Count
    instructions: bool
    previous: Ulid | None
    conversation: Ulid | None
    created: Count
    completed: Count
    status: Status
    usage: Usage
    settings: Settings


class Run(_Note):
    """Items in a row: those of `base` from number `first` on."""

    base: Ulid
    first: Count
    count: Annotated[int, Field(ge=1, le=2**16)]


class ConversationNote(_Note):
    """The session's messages are the items, in order. `head` is the session of the last response, if any:
    what it has in store of them need not be read again."""

    kind: Literal["conversation"] = "conversation"
    metadata: Metadata
    items: tuple[Run, ...]
    head: Ulid | None


Note = TypeVar("Note", ResponseNote, ConversationNote)


def read_note(kind: type[Note], text: str | None) -> Note | None:
    """None where it is no such note."""
    if text is None:
        return None
    try:
        return kind.model_validate_json(text)
    except ValidationError:
        return None
