"""What a request is followed by: its trace, which tells the stages of its turn.

Nothing here needs OpenTelemetry (see `otel`). Without it a request has the trace id that it came with.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from starlette.types import Scope

from sessions.service.record import Record
from sessions.service.stages import Note, Stage, unwatched

_KEY = "tenuto.trace"
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?"
)


class Trace(Protocol):
    """Of one request. Safe from many threads."""

    @property
    def id(self) -> str | None:
        """32 hex digits, the same for all that belongs together anywhere; None where nobody follows it."""
        ...

    def stage(self, stage: Stage) -> AbstractContextManager[Note]:
        """The stage, for as long as the block takes."""
        ...

    def end(self, record: Record, route: str, method: str, status: int) -> None:
        """The request was answered."""
        ...


class Tracing(Protocol):
    def begin(self, headers: Mapping[str, str]) -> Trace:
        """A request came, with these headers: `traceparent` may tell what it is a part of."""
        ...

    def close(self) -> None:
        """Send what was not sent yet."""
        ...


class Untraced:
    """Nobody follows the request here. Whoever sent it may, so its trace id is kept for the log."""

    def __init__(self, trace_id: str | None = None) -> None:
        self.id = trace_id

    def stage(self, stage: Stage) -> AbstractContextManager[Note]:
        return unwatched(stage)

    def end(self, record: Record, route: str, method: str, status: int) -> None:
        """Nobody is told."""


class NoTracing:
    def begin(self, headers: Mapping[str, str]) -> Untraced:
        found = _TRACEPARENT.fullmatch(headers.get("traceparent", "").strip())
        return Untraced(None if found is None else found[1])

    def close(self) -> None:
        """There is nothing to send."""


def attach_trace(scope: Scope, trace: Trace) -> None:
    scope[_KEY] = trace


def trace_of(scope: Scope) -> Trace:
    trace: Trace = scope[_KEY]
    return trace
