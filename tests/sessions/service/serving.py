"""The application over a real socket on the loopback, for as long as a `with` block."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

from sessions.service.access import Keys
from sessions.service.app import build_app
from sessions.service.backend import Backend
from sessions.service.config import ServiceConfig
from sessions.service.logs import Log
from sessions.service.tracing import Tracing


@dataclass(frozen=True)
class Served:
    """A running service: a client of it, and what it logged."""

    url: str
    client: httpx.Client
    log: io.StringIO

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.getvalue().splitlines()]

    def logged(self, count: int = 1) -> list[dict[str, Any]]:
        """The log once it has `count` requests: a line is written after the answer was sent."""
        until = time.monotonic() + 10
        while len(self.lines()) < count and time.monotonic() < until:
            time.sleep(0.005)
        return self.lines()


@contextmanager
def served(
    backend: Backend,
    config: ServiceConfig | None = None,
    keys: Keys | None = None,
    tracing: Tracing | None = None,
) -> Iterator[Served]:
    log = io.StringIO()
    app = build_app(backend, config, keys, Log(log), tracing)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, access_log=False, lifespan="on"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until = time.monotonic() + 30
        while not server.started and thread.is_alive() and time.monotonic() < until:
            time.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
            yield Served(url, client, log)
    finally:
        server.should_exit = True
        thread.join(60)
    assert not thread.is_alive()


def events(lines: Iterator[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of a native stream: name and data."""
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))
