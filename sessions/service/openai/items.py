"""Messages as items of the Responses API: how they are shown, listed and told apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

from engine.errors import SessionNotFound, Unsupported, UsageError
from sessions.service.ask import ChatMessage
from sessions.service.openai.contents import read_message


@dataclass(frozen=True, slots=True)
class Item:
    """A message with the id that it is known by."""

    id: str
    role: str
    text: str
    status: str = "completed"

    def shown(self, logprobs: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        if self.role != "assistant":
            content: dict[str, Any] = {"type": "input_text", "text": self.text}
        else:
            content = output_text(self.text, logprobs)
        return {
            "id": self.id,
            "type": "message",
            "role": self.role,
            "status": self.status,
            "content": [content],
        }


def output_text(text: str, logprobs: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def read_items(given: Sequence[Any], name: str) -> list[ChatMessage]:
    """The messages that items of a request are. Raises UsageError, Unsupported."""
    messages = []
    for at, each in enumerate(given):
        where = f"{name}[{at}]"
        kind = each.get("type", "message") if isinstance(each, dict) else "message"
        if kind != "message":
            if not isinstance(kind, str):
                raise UsageError(f"{where} has a type that is no text", param=f"{where}.type")
            raise Unsupported(
                f"{where}: items of type {kind[:40]!r} are not supported", param=f"{where}.type"
            )
        messages.append(read_message(each, where))
    return messages


def read_input(given: str | Sequence[Any], name: str = "input") -> list[ChatMessage]:
    """A text is what the user says."""
    if isinstance(given, str):
        return read_items([{"role": "user", "content": given}], name)
    return read_items(given, name)


def page(items: Sequence[Item], limit: int, order: str, after: str | None) -> dict[str, Any]:
    """A list of them. Raises SessionNotFound where `after` is none of them."""
    ordered = list(items) if order == "asc" else list(reversed(items))
    start = 0
    if after is not None:
        ids = [item.id for item in ordered]
        if after not in ids:
            raise SessionNotFound(f"there is no item {after[:80]!r}", param="after")
        start = ids.index(after) + 1
    some = ordered[start : start + limit]
    return {
        "object": "list",
        "data": [item.shown() for item in some],
        "first_id": some[0].id if some else None,
        "last_id": some[-1].id if some else None,
        "has_more": start + limit < len(ordered),
    }


# --- answered ---------------------------------------------------------------------------------


class InputText(BaseModel):
    type: Literal["input_text"]
    text: str


class OutputText(BaseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[dict[str, Any]]


class ItemOut(BaseModel):
    id: str
    type: Literal["message"]
    role: str
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[InputText | OutputText]


class ItemList(BaseModel):
    object: Literal["list"]
    data: list[ItemOut]
    first_id: str | None
    last_id: str | None
    has_more: bool
