"""Whom a request speaks for: the tenant of its API key, and whether it may come from where it does."""

from __future__ import annotations

import ipaddress
from typing import Protocol
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from sessions.service.config import ServiceConfig
from sessions.service.rates import Rate
from sessions.service.record import Record, record_of
from sessions.service.refusals import refusal

#: Whose the sessions are where there are no keys.
DEFAULT_TENANT = "default"
#: What needs no key: whether the service lives, and the page, which asks for one.
OPEN = frozenset({"/health", "/", "/openapi.json"})
OPEN_FOLDER = "/page/"


class Keys(Protocol):
    """API keys. `tenant` is asked in the event loop: it must be quick."""

    def tenant(self, key: str) -> str | None:
        """Whose key it is; None for one that is nobody's."""
        ...


class Access:
    """Middleware: 401 for a request without a key, where there are keys; without them 403 for a request that
    a page of elsewhere makes (by a name that it had made to point here, or across origins)."""

    def __init__(self, app: ASGIApp, keys: Keys | None, config: ServiceConfig) -> None:
        self._app, self._keys, self._config = app, keys, config
        self._rate = Rate(config.requests_per_minute)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refused = self._check_origin(headers) if self._keys is None else None
        if refused is not None:
            record_of(scope).error = "forbidden_origin"
            await refusal(403, refused, "forbidden_origin")(scope, receive, send)
            return
        tenant = self._tenant(headers)
        record = record_of(scope)
        record.tenant = tenant
        if not _is_open(scope["path"]):
            without = self._refuse(headers, tenant, record)
            if without is not None:
                await without(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refuse(self, headers: Headers, tenant: str | None, record: Record) -> Response | None:
        """Takes one of the tenant's requests, or says why there is none."""
        if tenant is None:
            given = "an API key is needed" if "authorization" not in headers else "this API key is nobody's"
            record.error = "invalid_api_key"
            answer = refusal(401, f"{given} (Authorization: Bearer …)", record.error)
            answer.headers["www-authenticate"] = "Bearer"
            return answer
        wait = self._rate.wait(tenant)
        if wait is not None:
            record.error = "rate_limit_exceeded"
            text = f"more than {self._config.requests_per_minute:g} requests a minute"
            return refusal(429, text, record.error, retry_after=wait)
        self._rate.take(tenant)
        return None

    def _tenant(self, headers: Headers) -> str | None:
        if self._keys is None:
            return DEFAULT_TENANT
        scheme, _, key = headers.get("authorization", "").partition(" ")
        return self._keys.tenant(key.strip()) if scheme.lower() == "bearer" and key.strip() else None

    def _check_origin(self, headers: Headers) -> str | None:
        host = headers.get("host", "")
        if not self._known(_name(f"//{host}")):
            return f"the service is not known by the name {host!r} (see --allow-host)"
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            return f"{origin!r} is another origin"
        return None

    def _known(self, name: str | None) -> bool:
        return name is not None and (name in self._config.hosts or is_loopback(name))


def is_loopback(name: str) -> bool:
    """Whether a host's name or address is this machine's own, which nobody else can reach."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _name(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _is_open(path: str) -> bool:
    return path in OPEN or path.startswith(OPEN_FOLDER)
