"""The application on a socket, until a signal ends it: first the turns, then the server."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from engine.errors import TenutoError
from sessions.service.backend import Backend
from sessions.service.logs import Log

#: Seconds that answers may take to reach their clients once no turn runs any more.
_LAST_WORDS = 10
#: Whose warnings are lines of our log.
_LOGGERS = ("uvicorn", "opentelemetry")


class Server(uvicorn.Server):
    """Ended by SIGTERM or SIGINT: new turns are refused at once, those that run have `drain` seconds to end,
    and are then cut off and saved as they are; meanwhile everything else is answered as before. A second
    signal ends the process there and then; the leases that it held end by themselves."""

    def __init__(
        self, app: ASGIApp, backend: Backend, drain: float, log: Log, started: Callable[[], None]
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_LAST_WORDS,
            )
        )
        self._backend, self._drain, self._log, self._started = backend, drain, log, started
        self._ending: threading.Thread | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._ending is not None:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        self._ending = threading.Thread(target=self._end, name="drain", daemon=True)
        self._ending.start()

    def _end(self) -> None:
        self._log.note("draining", seconds=self._drain)
        try:
            self._backend.drain(self._drain)
        except TenutoError as error:  # what could not be saved is lost either way; its turn said so
            self._log.note("drain_failed", error=type(error).__name__)
        finally:
            self.should_exit = True


class LibraryLog(logging.Handler):
    """What uvicorn and OpenTelemetry have to say, as lines of our log."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.note("server", level=record.levelname.lower(), message=record.getMessage().strip())


def serve(
    app: ASGIApp,
    backend: Backend,
    listening: socket.socket,
    drain: float,
    log: Log,
    started: Callable[[], None] = lambda: None,
) -> None:
    """Answer on `listening` until a signal. Call it in the main thread, where signals arrive."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    handler = LibraryLog(log)
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        Server(app, backend, drain, log, started).run([listening])
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
            logger.propagate = True
