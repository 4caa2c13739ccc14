"""Whom a request speaks for: the tenant of its API key, and whether it may come from where it does."""

from __future__ import annotations

from typing import Protocol
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.errors import KeyRefused, TenutoError
from sessions.service.address import is_loopback
from sessions.service.config import ServiceConfig
from sessions.service.rates import Rate
from sessions.service.record import Record, record_of
from sessions.service.refusals import body_of, code_of, refusal, status_of

#: Whose the sessions are where there are no keys.
DEFAULT_TENANT = "default"
#: What needs no key: whether the service lives, and the page, which asks for one.
OPEN = frozenset({"/health", "/", "/openapi.json"})
OPEN_FOLDER = "/page/"


class Key(Protocol):
    @property
    def tenant(self) -> str: ...


class Keys(Protocol):
    """API keys (`sessions.keys.ApiKeys`). Asked in the event loop: it must be quick."""

    def find(self, text: str) -> Key:
        """The key whose text this is. Raises KeyRefused."""
        ...


class Access:
    """Middleware: 401 for a request without a key, where there are keys; without them 403 for a request that
    a page of elsewhere makes (by a name that it had made to point here, or across origins). 429 for a tenant
    that asks too often."""

    def __init__(self, app: ASGIApp, keys: Keys | None, config: ServiceConfig) -> None:
        self._app, self._keys, self._config = app, keys, config
        self._rate = Rate(config.requests_per_minute)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record, headers = record_of(scope), Headers(scope=scope)
        is_open = scope["path"] in OPEN or scope["path"].startswith(OPEN_FOLDER)
        try:
            record.tenant = self._tenant(headers)
            refused = None if is_open else self._over_rate(record)
        except TenutoError as error:
            refused = None if is_open else _error(error)
            record.error = None if is_open else code_of(error)
        if self._keys is None and (why := self._strange(headers)) is not None:
            record.error = "forbidden_origin"
            refused = refusal(403, why, record.error)
        await (refused or self._app)(scope, receive, send)

    def _tenant(self, headers: Headers) -> str:
        if self._keys is None:
            return DEFAULT_TENANT
        given = headers.getlist("authorization")
        if len(given) > 1:  # whoever stands before us may have looked at the other one
            raise KeyRefused("there is more than one Authorization header")
        scheme, _, text = "".join(given).partition(" ")
        if scheme.lower() != "bearer" or not text.strip():
            raise KeyRefused("an API key is needed (Authorization: Bearer …)")
        return self._keys.find(text.strip()).tenant

    def _over_rate(self, record: Record) -> Response | None:
        """Takes one of the tenant's requests, or says that there is none."""
        assert record.tenant is not None
        wait = self._rate.wait(record.tenant)
        if wait is None:
            self._rate.take(record.tenant)
            return None
        record.error = "rate_limit_exceeded"
        text = f"more than {self._config.requests_per_minute:g} requests a minute"
        return refusal(429, text, record.error, retry_after=wait)

    def _strange(self, headers: Headers) -> str | None:
        """Why it must not come from where it does."""
        hosts = headers.getlist("host")
        host = hosts[0] if len(hosts) == 1 else ""
        if not self._known(_name(f"//{host}")):
            return f"the service is not known by the name {host!r} (see --allow-host)"
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return f"{origin!r} is another origin"
        return None

    def _known(self, name: str | None) -> bool:
        return name is not None and (name in self._config.hosts or is_loopback(name))


def _error(error: TenutoError) -> Response:
    answer = JSONResponse(body_of(error), status_of(error))
    if answer.status_code == 401:
        answer.headers["www-authenticate"] = "Bearer"
    return answer


def _name(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
