"""Bodies are bounded before they are read, and looked at before they are parsed."""

from __future__ import annotations

import re

import anyio
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
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
    """Middleware: 413 for a body of too many bytes, 408 for one that does not come, 400 for one that nests
    too deep or is no text. What is within bounds is read whole, and handed on."""

    def __init__(self, app: ASGIApp, config: ServiceConfig) -> None:
        self._app, self._config = app, config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        patient = _Patient(receive, self._config.patience)
        if scope["path"] in STREAMED:
            await self._app(scope, patient, send)
            return
        try:
            body = await self._read(scope, patient)
        except _Refused as error:
            record_of(scope).error = error.code
            await refusal(error.status, error.text, error.code)(scope, receive, send)
        else:
            await self._app(scope, _Replay(body, receive), send)

    async def _read(self, scope: Scope, receive: _Patient) -> bytes:
        """The whole body; of a client that went away, what there was. Raises _Refused."""
        most, deepest = self._config.max_body, self._config.max_depth
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdecimal() and int(declared) > most:
            raise _Refused(413, f"the body has more than {most:,} bytes", "body_too_large")
        body, more = bytearray(), True
        while more:
            try:
                message = await receive()
            except HTTPException as error:
                raise _Refused(error.status_code, error.detail, "request_timeout") from None
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > most:
                raise _Refused(413, f"the body has more than {most:,} bytes", "body_too_large")
        if not is_text(body):
            raise _Refused(400, "the body is no text in UTF-8", "body_not_text")
        if depth(body) > deepest:
            raise _Refused(400, f"the body nests deeper than {deepest}", "body_too_deep")
        return bytes(body)


class _Refused(Exception):
    def __init__(self, status: int, text: str, code: str) -> None:
        super().__init__(text)
        self.status, self.text, self.code = status, text, code


class _Patient:
    """What comes, for as long as pieces of the body do not let wait too long. After the body as long as it
    takes: that is how one hears that a client went away."""

    def __init__(self, receive: Receive, seconds: float) -> None:
        self._receive, self._seconds = receive, seconds
        self._more = True

    async def __call__(self) -> Message:
        """Raises HTTPException (408)."""
        if not self._more:
            return await self._receive()
        try:
            with anyio.fail_after(self._seconds):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(408, f"nothing of the body came for {self._seconds:g} s") from None
        self._more = message.get("more_body", False)
        return message


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


def is_text(body: bytes | bytearray) -> bool:
    """Whether JSON in it can only be text: UTF-8, and no half of a character that is escaped as two."""
    if b"\0" in body:  # as UTF-16 and UTF-32 have, which a parser would take as well
        return False
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return not any(found[1] for found in _ESCAPES.finditer(body))


def depth(body: bytes | bytearray) -> int:
    """How deep brackets nest in a text, if it is JSON."""
    deepest = now = 0
    for bracket in _NESTING.findall(_STRINGS.sub(b"", body)):
        now += 1 if bracket in b"[{" else -1
        deepest = max(deepest, now)
    return deepest
