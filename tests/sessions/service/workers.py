"""Several `tenuto serve` processes on one store, of which each may be killed and comes back."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tests.redis_server import free_port
from tests.sessions.service.crowd import Crowd, Heard

#: A lease that outlives its holder by little, and patience for one that does.
HURRIED = ("--lease", "2s", "--patience", "4s")


class Worker:
    """One process, always at the same port. Its log is in `log`."""

    def __init__(self, model: Path, store: str, folder: Path, *options: str) -> None:
        self.port = free_port()
        self.log = folder / f"worker-{self.port}.log"
        self._command = [
            *(sys.executable, "-m", "cli.main", "serve", "--model", str(model), "--store", store),
            *("--port", str(self.port), "--threads", "1", "--ctx", "4096", "--cells", "65536"),
            *("--sequences", "64", *HURRIED, *options),
        ]
        self.start()

    def start(self) -> None:
        with self.log.open("a") as log:
            self._popen = subprocess.Popen(
                self._command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def until_it_answers(self) -> None:
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        assert " at http://" in line, (line, self.log.read_text())

    def kill(self) -> None:
        """kill -9."""
        self._popen.kill()
        self._popen.wait()
        assert self._popen.stdout is not None
        self._popen.stdout.close()


class Workers:
    """So many of them, at the end of the block killed."""

    def __init__(self, count: int, model: Path, store: str, folder: Path, *options: str) -> None:
        self._workers = [Worker(model, store, folder, *options) for _ in range(count)]
        for worker in self._workers:
            worker.until_it_answers()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.kill()

    def __getitem__(self, at: int) -> Worker:
        return self._workers[at]

    def ports(self) -> Sequence[int]:
        return [worker.port for worker in self._workers]

    def logs(self) -> str:
        return "".join(worker.log.read_text() for worker in self._workers)


class Killer:
    """Once `heard` has as many turns as there are conversations, kills one of the workers after each `pause`
    seconds (the others have the work), and starts it again, until the end of the block. `kills` counts."""

    def __init__(
        self, workers: Workers, heard: Heard, crowd: Crowd, pause: float, most: int | None = None
    ) -> None:
        self._workers, self._heard, self._crowd = workers, heard, crowd
        self._pause, self._most = pause, most
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.kills = 0
        self.seconds = 0.0  # that a worker took to come back, in all

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(120)

    def _run(self) -> None:
        self._heard.wait_for(self._crowd.conversations)
        while not self._ending.wait(self._pause) and self.kills != self._most:
            worker = self._workers[self.kills % len(self._workers.ports())]
            started = time.monotonic()
            worker.kill()
            self.kills += 1
            worker.start()
            worker.until_it_answers()
            self.seconds += time.monotonic() - started
