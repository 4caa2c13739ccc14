"""Bodies are bounded before they are read, and looked at before they are parsed."""

from __future__ import annotations

import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sessions.service.config import ServiceConfig
from sessions.service.record import record_of
from sessions.service.refusals import refusal

#: Where a body is no JSON: its route reads it as it comes, with a bound of its own.
STREAMED = frozenset({"/v1/sessions/import"})

_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
#: An escape, whole; in the group a half of a surrogate pair that has no other half.
_ESCAPES = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
_NESTING = re.compile(rb"[\[{\]}]")


class Bodies:
    """Middleware: 413 for a body of too many bytes, 400 for one that nests too deep or is no text. What
    is within bounds is read whole, and handed on."""

    def __init__(self, app: ASGIApp, config: ServiceConfig) -> None:
        self._app, self._config = app, config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in STREAMED:
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        body = None
        if not declared.isdecimal() or int(declared) <= self._config.max_body:
            body = await self._read(receive)
        if body is None:
            text = f"the body has more than {self._config.max_body:,} bytes"
            record_of(scope).error = "body_too_large"
            await refusal(413, text, "body_too_large")(scope, receive, send)
        elif not is_text(body):
            record_of(scope).error = "body_not_text"
            await refusal(400, "the body is no text in UTF-8", "body_not_text")(scope, receive, send)
        elif depth(body) > self._config.max_depth:
            text = f"the body nests deeper than {self._config.max_depth}"
            record_of(scope).error = "body_too_deep"
            await refusal(400, text, "body_too_deep")(scope, receive, send)
        else:
            await self._app(scope, _Replay(body, receive), send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The whole body; None if it is too large. Of a client that went away, what there was."""
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
            part = message.get("body", b"")
            parts.append(part)
            size += len(part)
            if size > self._config.max_body:
                return None
            more = message.get("more_body", False)
        return b"".join(parts)


class _Replay:
    """The body that was read, and then whatever comes."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


def is_text(body: bytes) -> bool:
    """Whether JSON in it can only be text: UTF-8, and no half of a character that is escaped as two."""
    if b"\0" in body:  # as UTF-16 and UTF-32 have, which a parser would take as well
        return False
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return not any(found[1] for found in _ESCAPES.finditer(body))


def depth(body: bytes) -> int:
    """How deep brackets nest in a text, if it is JSON."""
    deepest = now = 0
    for bracket in _NESTING.findall(_STRINGS.sub(b"", body)):
        now += 1 if bracket in b"[{" else -1
        deepest = max(deepest, now)
    return deepest
