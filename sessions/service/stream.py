"""A reply as server-sent events, while it is said."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.errors import TenutoError
from sessions.service.running import Turn
from sessions.service.told import Begun, Told

_EVENTS = "text/event-stream"
#: What some clients end a line at, though it is none of the three ends that events have; in JSON all of them
#: stand inside of strings.
_LINES = {ord(each): f"\\u{ord(each):04x}" for each in "\x85\u2028\u2029"}
#: A comment, which every client of such streams skips.
_ALIVE = ": \n\n"


#: How a route that may stream describes it, beside its JSON: `responses={200: STREAMED, ...}`.
STREAMED: dict[str, Any] = {
    "content": {
        _EVENTS: {
            "itemSchema": {
                "type": "object",
                "required": ["data"],
                "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
            }
        }
    }
}


class Frames(Protocol):
    """How an API writes a turn as events. Each string is one whole event (see `event`)."""

    def begun(self, begun: Begun) -> Iterable[str]: ...

    def told(self, told: Told) -> Iterable[str]:
        """Of what came after Begun."""
        ...

    def failed(self, error: TenutoError) -> Iterable[str]:
        """The turn failed after it began: the last events. The status is said already."""
        ...

    def end(self) -> Iterable[str]:
        """After the last event of a turn that did not fail."""
        ...


def event(data: Mapping[str, Any] | str, name: str | None = None) -> str:
    """One event; an object is written as JSON."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    text = text.translate(_LINES)
    return f"data: {text}\n\n" if name is None else f"event: {name}\ndata: {text}\n\n"


class TurnStream(Response):
    """Answers with the events of a turn that has begun. Goes on to the end of the turn when the client is
    gone, which is soon: then the turn is saved, and the log knows what it was."""

    media_type = _EVENTS

    def __init__(
        self, turn: Turn, begun: Begun, frames: Frames, headers: Mapping[str, str], keepalive: float
    ) -> None:
        super().__init__(None, 200, {**headers, "cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._turn, self._begun, self._frames, self._keepalive = turn, begun, frames, keepalive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def say(events: Iterable[str]) -> None:
            data = "".join(events).encode()
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await say(self._frames.begun(self._begun))
            async for told in self._turn.events(self._keepalive):
                await say([_ALIVE] if told is None else self._frames.told(told))
            await say(self._frames.end())
        except TenutoError as error:
            await say(self._frames.failed(error))
        finally:  # a client that takes nothing more is as good as gone
            self._turn.cancel()
            self._turn.leave()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
