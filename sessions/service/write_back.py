"""Write-back: a session's turn ends when it was said, and is saved right after, in the background.

Until then it is in this process's memory alone, with its sequence and its lease, so that nobody else can
write to the session; who asks for the session here waits until it is saved. A process that is killed loses
the turns that it had not saved yet. There are never more of them than the bounds say: a turn that finds no
room, or one that waits for too long, is saved before it ends, as without write-back.

A save is what it always is, blobs before the manifest before the swap of the ref: no ref names what is not
in the store.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from engine.errors import ConfigError, TenutoError
from sessions.service.admission import Borrowed

#: What saves a turn, and says why it could not. What it could not save may be lost, or held in memory.
Save = Callable[[], TenutoError | None]

_WORKERS = 4


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much may wait to be saved: `nbytes` of rows before encoding, and no turn is added to others while
    the oldest of them waits for `seconds` already."""

    nbytes: int
    seconds: float = 5.0

    def __post_init__(self) -> None:
        if self.nbytes <= 0 or self.seconds <= 0:
            raise ConfigError("write-back: both bounds must be above 0")


@dataclass(frozen=True, slots=True)
class WriteBackLoad:
    """Turns and bytes that wait, for how long the oldest does, and how many were saved and could not be."""

    num_turns: int
    nbytes: int
    seconds: float
    num_saved: int
    num_failed: int


@dataclass(frozen=True, slots=True)
class _Waiting:
    num_cells: int
    nbytes: int
    since: float


class WriteBack:
    """Safe from many threads. Ended by `close`, which waits for all that was taken."""

    def __init__(self, bounds: Bounds, num_seqs: int, num_cells: int) -> None:
        """Waiting turns hold sequences of the engine: at most half of the `num_seqs` that there are, and a
        quarter of the `num_cells`."""
        self._bounds = bounds
        self._most_turns, self._most_cells = max(1, num_seqs // 2), max(1, num_cells // 4)
        self._changed = threading.Condition()
        self._waiting: dict[tuple[str, str], _Waiting] = {}
        self._saved = self._failed = 0
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="write-back")

    def held(self) -> Borrowed:
        """What the waiting turns hold of the engine."""
        with self._changed:
            return Borrowed(len(self._waiting), sum(each.num_cells for each in self._waiting.values()))

    def load(self) -> WriteBackLoad:
        with self._changed:
            since = min((each.since for each in self._waiting.values()), default=None)
            return WriteBackLoad(
                len(self._waiting),
                sum(each.nbytes for each in self._waiting.values()),
                0.0 if since is None else time.monotonic() - since,
                self._saved,
                self._failed,
            )

    def take(self, tenant: str, session: str, num_cells: int, nbytes: int, save: Save) -> bool:
        """Have the session's turn saved soon. False where the bounds forbid it: its caller saves it at
        once."""
        key, waiting = (tenant, session), _Waiting(num_cells, nbytes, time.monotonic())
        with self._changed:
            if not self._has_room(waiting):
                return False
            self._waiting[key] = waiting
        self._pool.submit(self._run, key, waiting, save)
        return True

    def holds(self, tenant: str) -> bool:
        """Whether anything of the tenant waits."""
        with self._changed:
            return any(key[0] == tenant for key in self._waiting)

    def stored(self, tenant: str, session: str) -> None:
        """Wait until the session's turn is saved, or is in memory as one that could not be, or lost."""
        with self._changed:
            self._changed.wait_for(lambda: (tenant, session) not in self._waiting)

    def wait(self) -> None:
        """Wait until nothing waits."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)

    def close(self) -> None:
        self._pool.shutdown()

    def _has_room(self, more: _Waiting) -> bool:
        all_of_them = (*self._waiting.values(), more)
        return (
            sum(each.nbytes for each in all_of_them) <= self._bounds.nbytes
            and more.since - all_of_them[0].since < self._bounds.seconds
            and len(all_of_them) <= self._most_turns
            and sum(each.num_cells for each in all_of_them) <= self._most_cells
        )

    def _run(self, key: tuple[str, str], waiting: _Waiting, save: Save) -> None:
        is_saved = False
        try:
            is_saved = save() is None
        finally:
            with self._changed:
                self._saved += is_saved
                self._failed += not is_saved
                # The lease is given back by now, and the session's next turn may wait in its place.
                if self._waiting.get(key) is waiting:
                    del self._waiting[key]
                self._changed.notify_all()
