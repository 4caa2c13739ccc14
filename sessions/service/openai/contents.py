"""Messages of a request, whose content is a text or a list of parts, as those that the template knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import Unsupported, UsageError
from sessions.service.ask import ChatMessage
from sessions.transcript import whole_characters

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXTS = ("text", "input_text", "output_text")
#: What a message may say beside role and content, as long as it asks for nothing.
_EMPTY: tuple[Any, ...] = (None, [], "")
#: What clients send back of a message that they were given, and what says nothing about it.
_SAID_BACK = frozenset({"id", "type", "status", "annotations", "phase", "object"})


def read_messages(given: Sequence[Any], name: str) -> list[ChatMessage]:
    """The messages of the field `name`. Raises UsageError or Unsupported, which name what is wrong."""
    return [read_message(each, f"{name}[{at}]") for at, each in enumerate(given)]


def read_message(given: Any, where: str) -> ChatMessage:
    """Roles as they were said: "developer" is one to the client, and "system" to the template (see
    `for_template`)."""
    if not isinstance(given, Mapping):
        raise UsageError(f"{where} is no message", param=where)
    role = given.get("role")
    if not isinstance(role, str):
        raise UsageError(f"{where} has no role", param=f"{where}.role")
    if role not in _ROLES:
        raise Unsupported(f"{where}: the role {role[:40]!r} is not supported", param=f"{where}.role")
    for name, value in given.items():
        if name not in ("role", "content", *_SAID_BACK) and value not in _EMPTY:
            raise Unsupported(f"{where}: {str(name)[:40]!r} is not supported", param=f"{where}.{name[:40]}")
    return ChatMessage(role, whole_characters(_text(given.get("content"), f"{where}.content", role)))


def for_template(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    return [ChatMessage(_ROLES[message.role], message.text) for message in messages]


def _text(content: Any, where: str, role: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list):
        raise UsageError(f"{where} is neither a text nor a list of parts", param=where)
    return "".join(_part(part, f"{where}[{at}]") for at, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if not isinstance(part, Mapping):
        raise UsageError(f"{where} is no part of a content", param=where)
    kind = part.get("type")
    if kind not in _TEXTS:
        if not isinstance(kind, str):
            raise UsageError(f"{where} has no type", param=f"{where}.type")
        raise Unsupported(f"{where}: {kind[:40]!r} is not supported, texts alone are", param=f"{where}.type")
    text = part.get("text")
    if not isinstance(text, str):
        raise UsageError(f"{where} has no text", param=f"{where}.text")
    return text
