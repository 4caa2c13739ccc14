"""Each request has an id, a line in the log, and its place in the metrics; none ends without an answer."""

from __future__ import annotations

import re
import time

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from ulid import ULID

from sessions.service.config import ServiceConfig
from sessions.service.logs import Log
from sessions.service.metrics import Metrics
from sessions.service.record import Record, attach
from sessions.service.refusals import refusal
from sessions.service.tracing import Tracing, attach_trace

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
#: A route's label where there is none: what is asked for must not become labels without end.
_NO_ROUTE = "none"
#: Methods that have a label of their own.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Observing:
    """Middleware, the outermost. A request's x-request-id is kept if it may be one, and told in the answer.
    Refuses a request beyond those that are answered at once, and answers 500 for a bug of ours."""

    def __init__(
        self, app: ASGIApp, config: ServiceConfig, metrics: Metrics, log: Log, tracing: Tracing
    ) -> None:
        self._app, self._config, self._metrics, self._log = app, config, metrics, log
        self._tracing = tracing
        self._now = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given, trace = headers.get("x-request-id", ""), self._tracing.begin(headers)
        record = Record(given if _ID.fullmatch(given) else str(ULID()), trace.id)
        attach(scope, record)
        attach_trace(scope, trace)
        started, answer = time.perf_counter(), _Answer(send, record.request_id, self._config.patience)
        self._now += 1
        try:
            await self._answer(scope, receive, answer, record)
        finally:
            self._now -= 1
            seconds = time.perf_counter() - started
            found = scope.get("route")
            route = found.path if isinstance(found, Route) else _NO_ROUTE
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._metrics.answered(route, method, answer.status, seconds)
            self._log.request(record, route, method, answer.status, seconds)
            trace.end(record, route, method, answer.status)

    async def _answer(self, scope: Scope, receive: Receive, answer: _Answer, record: Record) -> None:
        if self._now > self._config.max_requests:
            record.error = "too_many_requests"
            text = f"{self._config.max_requests} requests are being answered, and no more may be"
            wait = self._config.retry_after
            await refusal(429, text, record.error, retry_after=wait)(scope, receive, answer.send)
            return
        try:
            await self._app(scope, receive, answer.send)
        except ClientDisconnect:
            record.error = "client_gone"
        except Exception as error:
            record.error = "bug"
            self._log.bug(record, error)
            if not answer.begun:  # else its end never comes, and the client knows that it is none
                text = "a bug of ours; the log has it under this request's id"
                await refusal(500, text, "internal_error")(scope, receive, answer.send)


class _Answer:
    """Passes an answer on with its request's id, and remembers its status. Raises ClientDisconnect when the
    client takes none of it for too long."""

    def __init__(self, send: Send, request_id: str, patience: float) -> None:
        self._send, self._request_id = send, request_id
        self._patience = patience
        self.begun = False
        self.status = 500

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun, self.status = True, message["status"]
            MutableHeaders(scope=message)["x-request-id"] = self._request_id
        try:
            with anyio.fail_after(self._patience):
                await self._send(message)
        except TimeoutError:
            raise ClientDisconnect from None
