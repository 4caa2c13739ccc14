"""The HTTP application: routes over a backend, and what stands before them.

A request passes, from the outside in: `observing` (its id, log and metrics), `access` (its tenant), `bodies`
(its size), then its route. Routes are one file for each group, and know only a `Call`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from engine.errors import TenutoError
from sessions.service import (
    archives,
    health,
    page_routes,
    sessions_routes,
    slots,
    storage_routes,
    turns_routes,
    words,
)
from sessions.service.access import Access, Keys
from sessions.service.backend import Backend
from sessions.service.bodies import Bodies
from sessions.service.call import Service
from sessions.service.config import ServiceConfig
from sessions.service.logs import Log
from sessions.service.metrics import Metrics
from sessions.service.observing import Observing
from sessions.service.openai.table import OPENAI
from sessions.service.openapi import describe
from sessions.service.rates import Rate
from sessions.service.refusals import http_error, invalid, tenuto_error
from sessions.service.slot_table import SlotTable
from sessions.service.storage import Storage
from sessions.service.sweeper import Sweeper, Swept
from sessions.service.threads import Threads
from sessions.service.tracing import NoTracing, Tracing

#: A path is looked for in this order: "import" is no session's name.
ROUTERS = (
    archives.router,
    sessions_routes.router,
    turns_routes.router,
    storage_routes.router,
    slots.router,
    words.router,
    health.router,
    page_routes.router,
    *OPENAI,
)


def build_app(
    backend: Backend,
    config: ServiceConfig | None = None,
    keys: Keys | None = None,
    log: Log | None = None,
    tracing: Tracing | None = None,
    tenants: Callable[[], Iterable[str]] = tuple,
) -> FastAPI:
    """An application that answers for `backend`, which stays its owner's: it is not closed with it. Without
    `keys` everyone is the tenant "default", so it must not be reachable from elsewhere. `log` is written one
    line a request, `tracing` told of each; both stay their owner's. Of `tenants` the stores are looked at and
    swept, beside those of the backend's own."""
    config, log = config or ServiceConfig(), log or Log(None)

    def everyone() -> Iterable[str]:
        return {*backend.tenants(), *tenants()}

    def told(swept: Swept) -> None:
        service.metrics.swept(swept)
        log.swept(swept)

    storage = Storage(backend.managed, everyone)
    service = Service(
        backend,
        config,
        Metrics(backend, storage),
        Threads(config.max_requests, config.threads),
        asyncio.Semaphore(config.max_imports),
        SlotTable(backend.model.num_seqs),
        Rate(config.tokens_per_minute),
        keys is not None,
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        sweeper = None
        if config.sweep is not None:
            sweeper = Sweeper(backend.managed, everyone, config.sweep, told)
            sweeper.start()
        yield
        if sweeper is not None:
            await asyncio.to_thread(sweeper.close)
        await asyncio.to_thread(storage.close)
        service.threads.close()

    app = FastAPI(
        title="tenuto",
        version=version("tenuto"),
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = service
    app.add_exception_handler(TenutoError, tenuto_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, invalid)
    for router in ROUTERS:
        app.include_router(router)
    # The last that is added is the outermost.
    app.add_middleware(Bodies, config=config)
    app.add_middleware(Access, keys=keys, config=config)
    app.add_middleware(
        Observing, config=config, metrics=service.metrics, log=log, tracing=tracing or NoTracing()
    )
    describe(app, with_keys=keys is not None)
    return app
