"""What a route is handed: the service, and the request that it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, ParamSpec, TypeVar

from fastapi import Depends
from starlette.requests import Request

from engine.errors import Busy
from sessions.restore import RestoreResult
from sessions.service.ask import Ask
from sessions.service.backend import Backend
from sessions.service.config import ServiceConfig
from sessions.service.metrics import Metrics
from sessions.service.rates import Rate
from sessions.service.record import Record, record_of
from sessions.service.running import Cancel, Turn
from sessions.service.slot_table import SlotTable
from sessions.service.threads import Threads
from sessions.service.told import Begun, Ended, Said, Told
from sessions.service.tracing import trace_of

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Service:
    """What all requests share."""

    backend: Backend
    config: ServiceConfig
    metrics: Metrics
    threads: Threads
    imports: asyncio.Semaphore
    slots: SlotTable
    tokens: Rate
    with_keys: bool


@dataclass(frozen=True, slots=True)
class Call:
    """One request. `tenant` is whom it speaks for."""

    service: Service
    request: Request
    record: Record

    @property
    def tenant(self) -> str:
        assert self.record.tenant is not None, "a route that needs no key asked for the tenant"
        return self.record.tenant

    @property
    def is_operator(self) -> bool:
        """Whether it may see what is counted of all tenants."""
        return not self.service.with_keys or self.tenant in self.service.config.operators

    @property
    def backend(self) -> Backend:
        return self.service.backend

    async def run(self, verb: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What a blocking verb returns or raises."""
        return await self.service.threads.call(verb, *args, **kwargs)

    async def run_long(self, verb: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The same for a verb that may take minutes."""
        return await self.service.threads.call_long(verb, *args, **kwargs)

    def turn(self, ask: Ask, begin: Callable[[Ask], Iterator[Told]], slot: int | None = None) -> Turn:
        """Start a turn, which ends when the client goes away. `begin` is given `ask` with its `cancel`;
        `slot` is the one of llama-server's that it is to be said in. Raises Busy for a tenant that had all
        the tokens it may have in a minute: those that are read for it, and said; UsageError for a slot that
        there is not."""
        if slot is not None:
            self.service.slots.check(slot)
        tokens, tenant = self.service.tokens, self.tenant
        watch = trace_of(self.request.scope).stage
        wait = tokens.wait(tenant)
        if wait is not None:
            raise Busy("as many tokens as may be in a minute were computed", retry_after=wait)

        def told(cancel: Cancel) -> Iterator[Told]:
            with self.service.slots.turn(self.tenant, slot) as heard:
                for each in begin(replace(ask, cancel=cancel, watch=watch)):
                    heard(each)
                    self.record.hear(each)
                    self.service.metrics.hear(each)
                    tokens.take(tenant, _computed(each))
                    yield each

        return Turn(self.service.threads, told, self.request.receive)


def _computed(told: Told) -> int:
    match told:
        case Begun():
            return told.prompt_tokens - told.restored.restored
        case Said():
            return 0 if told.piece.token is None else 1
        case Ended():
            return 0


def call_of(request: Request) -> Call:
    return Call(request.app.state.service, request, record_of(request.scope))


#: The parameter of a route that is given the call.
TheCall = Annotated[Call, Depends(call_of)]


def restored_headers(restored: RestoreResult) -> dict[str, str]:
    """On every reply that restored anything."""
    return {
        "x-tenuto-restored-tokens": str(restored.restored),
        "x-tenuto-recomputed-tokens": str(restored.recomputed),
        "x-tenuto-reason": restored.reason.value,
    }
