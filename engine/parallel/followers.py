"""The processes of the other ranks, where rank 0 starts them itself."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from engine.errors import RankLost
from engine.parallel.world import LOOPBACK

TCPStore = dist.TCPStore  # type: ignore[attr-defined]  # torch has it there, but not in its list

#: Seconds: for all to be started, for one that ended to be seen, and for one that was told so to end.
_STARTING, _SEEN, _ENDING = 120.0, 1.0, 5.0


#: What a follower runs: where the packages are comes first, its place in the world behind it.
_FOLLOWER = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from engine.parallel.follower import main
main(*map(int, sys.argv[1:]))
"""


class Followers:
    """Ranks 1 to `size` - 1, on this machine. They are ended with `end`, and end by themselves when this
    process does: their connection to it closes. Ctrl-C does not reach them."""

    def __init__(self, size: int) -> None:
        """Starts them; `store` is where they come to. Raises RankLost where one does not."""
        with socket.create_server((LOOPBACK, 0)) as server:
            self._port: int = server.getsockname()[1]
            self.store = TCPStore(
                LOOPBACK,
                self._port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=_STARTING),
                master_listen_fd=server.detach(),
            )
        self._processes = {rank: self._start(rank, size) for rank in range(1, size)}
        try:
            self._await()
        except BaseException:
            self.kill()
            raise

    def _start(self, rank: int, size: int) -> subprocess.Popen[bytes]:
        # The packages of this process, not those of whatever folder the user is in.
        ours = str(Path(__file__).parent.parent.parent)
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _FOLLOWER, ours, str(rank), str(size), str(self._port)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _await(self) -> None:
        deadline = time.monotonic() + _STARTING
        while not self.store.check([present(rank) for rank in self._processes]):
            if self._codes():
                raise RankLost(f"the model could not be divided: {self._ended()}")
            if time.monotonic() > deadline:
                raise RankLost(f"the model could not be divided: no rank came within {_STARTING:g} seconds")
            time.sleep(0.02)

    @property
    def pids(self) -> dict[int, int]:
        """The process of each rank."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def lost(self) -> str | None:
        """Which of them ended, if any did; then all are ended."""
        deadline = time.monotonic() + _SEEN
        while not self._codes() and time.monotonic() < deadline:
            time.sleep(0.02)
        who = self._ended()
        self.kill()
        return who

    def end(self) -> None:
        """Wait until all have ended; whoever was told so and does not is killed."""
        deadline = time.monotonic() + _ENDING
        while len(self._codes()) < len(self._processes) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.kill()

    def _codes(self) -> dict[int, int]:
        polled = {rank: process.poll() for rank, process in self._processes.items()}
        return {rank: code for rank, code in polled.items() if code is not None}

    def _ended(self) -> str | None:
        for rank, code in self._codes().items():
            how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
            return f"rank {rank} ended ({how})"
        return None

    def kill(self) -> None:
        """End those that are there, at once."""
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()


def present(rank: int) -> str:
    """The key by which a rank says that it is there."""
    return f"present/{rank}"
