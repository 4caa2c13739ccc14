"""The JSON of the session routes: what is asked, which is checked here, and what is answered."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from engine.errors import UsageError
from engine.state import SamplerParams
from serialization.blobs import BlobId
from sessions.restore import Fallback, RestoreResult
from sessions.service.ask import Ask, ChatMessage, Format
from sessions.service.refusals import ErrorDetail, body_of
from sessions.service.told import Begun, Ended, SessionView
from sessions.session import SaveResult

Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class Asked(BaseModel):
    """A body that is asked for: exact types, and no field that is not known."""

    model_config = ConfigDict(extra="forbid", strict=True)


# --- asked ------------------------------------------------------------------------------------


class Sampling(Asked):
    """How the next token is chosen: what is given; the rest is as it was, or by default."""

    temperature: float | None = Field(default=None, ge=0, le=1e6)
    top_k: int | None = Field(default=None, ge=0, le=2**31)
    top_p: float | None = Field(default=None, gt=0, le=1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repeat_penalty: float | None = Field(default=None, gt=0, le=1e6)
    presence_penalty: float | None = Field(default=None, ge=-1e6, le=1e6)
    frequency_penalty: float | None = Field(default=None, ge=-1e6, le=1e6)
    penalty_last_n: int | None = Field(default=None, ge=0, le=2**31)
    logit_bias: dict[str, float] | None = Field(default=None, max_length=1024, description="token id: bias")
    seed: int | None = Field(default=None, ge=0, lt=2**64)

    def given(self) -> dict[str, Any]:
        values = self.model_dump(exclude_none=True)
        if self.logit_bias is not None:
            values["logit_bias"] = _biases(self.logit_bias)
        return values

    def new(self) -> SamplerParams:
        """For a session that has none yet: a seed of its own unless one is given."""
        return SamplerParams(**{"seed": secrets.randbits(63), **self.given()})


class Create(Asked):
    name: Name | None = None
    title: str = Field(default="", max_length=200)
    system: str | None = Field(default=None, description="the system message that it begins with")
    sampler: Sampling | None = None


class Rename(Asked):
    name: Name | None


class Fork(Asked):
    name: Name | None = None
    turns_back: int = Field(default=0, ge=0, le=2**31, description="how many of the last turns it is without")


class Rewind(Asked):
    turns: int = Field(default=1, ge=1, le=2**31)


class MessageIn(Asked):
    role: Literal["system", "user", "assistant"]
    content: str


class Reply(Asked):
    """How to reply."""

    stream: bool = False
    max_tokens: int | None = Field(default=None, ge=1, le=2**31)
    stop: list[Annotated[str, Field(min_length=1, max_length=1000)]] = Field(default=[], max_length=16)
    sampler: Sampling | None = None
    format: Literal["text", "json_object"] = "text"
    fallback: Literal["recompute", "refuse"] = Field(
        default="recompute", description="what happens to stored rows that cannot be believed"
    )
    cache_salt: str = Field(
        default="", max_length=128, description="shares no past but with calls of the same salt"
    )

    def ask(self, sampler: SamplerParams | None, expected: BlobId | None) -> Ask:
        return Ask(
            max_tokens=self.max_tokens,
            stop=tuple(self.stop),
            sampler=sampler,
            format=Format(self.format),
            fallback=Fallback(self.fallback),
            expected=expected,
            salt=self.cache_salt,
        )

    def sampler_over(self, stored: Callable[[], SessionView]) -> SamplerParams | None:
        """The session's sampler with what is given in place; None where nothing is given."""
        if self.sampler is None:
            return None
        return replace(stored().sampler, **self.sampler.given())


class Say(Reply):
    """The next messages, and how to reply to them."""

    messages: list[MessageIn] = Field(min_length=1, max_length=1000)

    def said(self) -> list[ChatMessage]:
        return [ChatMessage(message.role, message.content) for message in self.messages]


class Edit(Reply):
    content: str = Field(description="what takes the place of the user's last message")


# --- answered ---------------------------------------------------------------------------------


class MessageOut(BaseModel):
    """`start` and `stop` are the tokens that it was fed as."""

    role: str
    content: str
    start: int
    stop: int


class SessionLine(BaseModel):
    """A session as a list shows it; times are seconds since the epoch, `length` is in tokens."""

    id: str
    object: Literal["session"]
    name: str | None
    title: str
    parent: str | None
    model: str
    generation: int
    etag: str
    created: float
    updated: float
    length: int
    turns: int
    resident: bool


class SessionOut(SessionLine):
    messages: list[MessageOut]
    sampler: dict[str, Any]


class SessionList(BaseModel):
    """`after` is what to ask for to get those that follow; null at the end."""

    object: Literal["list"]
    data: list[SessionLine]
    after: str | None


class Restored(BaseModel):
    """What of the past was not read again, what was, and why."""

    reason: str
    restored_tokens: int
    recomputed_tokens: int
    seconds: float
    detail: str


class Saved(BaseModel):
    generation: int
    blobs_written: int
    bytes_written: int
    seconds: float


class Spoken(BaseModel):
    content: str
    finish: str
    tokens: int


class TurnOut(BaseModel):
    """A whole turn. Where `save_error` is there, the turn is in this process's memory alone. One that is
    `pending` is being saved: its etag is not known yet."""

    session: str
    etag: str | None
    prompt_tokens: int
    restored: Restored
    reply: Spoken
    saved: Saved | None
    save_error: ErrorDetail | None
    pending: bool


class Rewound(BaseModel):
    session: SessionOut
    restored: Restored


class SavedOut(BaseModel):
    """`saved` is null where all was stored already."""

    session: SessionOut
    saved: Saved | None


def line(view: SessionView) -> dict[str, Any]:
    turns = sum(message.role == "user" for message in view.messages)
    return {
        "id": view.id,
        "object": "session",
        "name": view.name,
        "title": view.title,
        "parent": view.parent,
        "model": view.model,
        "generation": view.generation,
        "etag": view.etag,
        "created": view.created,
        "updated": view.updated,
        "length": view.length,
        "turns": turns,
        "resident": view.resident,
    }


def whole(view: SessionView) -> dict[str, Any]:
    messages = [
        {"role": message.role, "content": message.text, "start": message.start, "stop": message.stop}
        for message in view.messages
    ]
    sampler = asdict(view.sampler)
    biases = view.sampler.logit_bias
    sampler["logit_bias"] = {str(token): max(bias, -1e308) for token, bias in biases}  # JSON has no infinity
    return {**line(view), "messages": messages, "sampler": sampler}


def restored(result: RestoreResult) -> dict[str, Any]:
    return {
        "reason": result.reason.value,
        "restored_tokens": result.restored,
        "recomputed_tokens": result.recomputed,
        "seconds": result.seconds,
        "detail": result.detail,
    }


def saved(result: SaveResult) -> dict[str, Any]:
    return asdict(result)


def begun(told: Begun) -> dict[str, Any]:
    return {
        "session": told.session,
        "prompt_tokens": told.prompt_tokens,
        "restored": restored(told.restored),
    }


def ended(told: Ended) -> dict[str, Any]:
    """What a turn's end adds to its beginning."""
    reply = told.replies[0]
    return {
        "etag": told.etag,
        "reply": {"content": reply.text, "finish": reply.finish, "tokens": reply.num_tokens},
        "saved": None if told.saved is None else saved(told.saved),
        "save_error": None if told.save_error is None else body_of(told.save_error)["error"],
        "pending": told.pending,
    }


def _biases(given: dict[str, float]) -> tuple[tuple[int, float], ...]:
    for token in given:
        if not (token.isascii() and token.isdecimal()) or len(token) > 9:
            raise UsageError(f"{token!r} is no token id", param="sampler.logit_bias")
    return tuple(sorted((int(token), bias) for token, bias in given.items()))
