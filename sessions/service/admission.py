"""Who may run now: so many turns at once, and no more than the cells of the engine can hold."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from engine.errors import Busy, Draining, NoSlot
from engine.generation import Cancel

#: Seconds between two looks at whether one who waits still wants to.
_PATIENCE = 0.1


@dataclass(frozen=True, slots=True)
class Borrowed:
    """Sequences and cells of the engine that some hold who will give them back by themselves."""

    num_seqs: int = 0
    num_cells: int = 0


class Admission:
    """A queue before the engine, first come, first served. Safe from many threads.

    A turn is let in when fewer than `max_turns` run, and there are sequences for its replies. Before it
    reads its prompt it reserves the cells that it may need, and waits until those that run leave room for
    it, and those that give back what they borrowed; one alone is never kept waiting, however much it
    wants. Idle sequences are not counted: they give way.
    """

    def __init__(
        self,
        max_turns: int,
        max_waiting: int,
        num_seqs: int,
        num_cells: int,
        held: Callable[[], int],
        borrowed: Callable[[], Borrowed] = Borrowed,
    ) -> None:
        """Of the `num_seqs` as many as `held` says are not to be had; for what is `borrowed` one waits."""
        self._max_turns = max_turns
        self._max_waiting = max_waiting
        self._num_seqs = num_seqs
        self._num_cells = num_cells
        self._held = held
        self._borrowed = borrowed
        self._changed = threading.Condition()
        self._running = 0
        self._replies = 0
        self._reserved = 0
        self._turns: deque[object] = deque()
        self._wanting: deque[object] = deque()
        self._draining = False
        self._seconds = 1.0

    @property
    def running(self) -> int:
        return self._running

    @property
    def waiting(self) -> int:
        return len(self._turns)

    @property
    def draining(self) -> bool:
        return self._draining

    @contextmanager
    def turn(self, cancel: Cancel | None, num_replies: int = 1, has: int = 0) -> Iterator[None]:
        """A place among those that run, for as long as the block takes. Of the sequences that it needs for
        its replies it `has` some, that are held.

        Raises Busy where too many wait, or who waited is `cancel`led; NoSlot where there can never be as many
        sequences as long as others are held; Draining.
        """
        self._enter(cancel, num_replies, num_replies - has)
        started = time.monotonic()
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._replies -= num_replies
                self._seconds += 0.1 * (time.monotonic() - started - self._seconds)
                self._changed.notify_all()

    @contextmanager
    def cells(self, count: int, cancel: Cancel | None) -> Iterator[None]:
        """Room for `count` cells. One who is `cancel`led waits no longer, and has it."""
        with self._changed:
            self._queue(self._wanting, lambda: self._fits(count), cancel)
            self._reserved += count
        try:
            yield
        finally:
            with self._changed:
                self._reserved -= count
                self._changed.notify_all()

    def drain(self) -> None:
        """Let nobody in any more; those that wait are turned away."""
        with self._changed:
            self._draining = True
            self._changed.notify_all()

    def wait_until_idle(self, seconds: float | None) -> bool:
        """Whether no turn runs any more, within so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._running == 0, seconds)

    def _enter(self, cancel: Cancel | None, num_replies: int, wanted: int) -> None:
        with self._changed:
            self._refuse()
            if wanted > self._num_seqs - self._held():
                raise NoSlot(
                    f"{wanted} sequences are needed; of {self._num_seqs} there are {self._held()} with turns "
                    "that could not be saved"
                )
            if len(self._turns) >= self._max_waiting and not self._may_run(wanted):
                raise Busy(
                    f"{self._running} turns run and {len(self._turns)} wait, which is as many as may",
                    retry_after=self._retry_after(),
                )
            came = self._queue(self._turns, lambda: self._may_run(wanted), cancel)
            self._refuse()
            if not came:
                raise Busy("it was cancelled while it waited", retry_after=self._retry_after())
            self._running += 1
            self._replies += num_replies

    def _queue(self, queue: deque[object], comes: Cancel, cancel: Cancel | None) -> bool:
        """Wait in `queue` until one is the first and `comes()`; False where that was cut short."""
        place = object()
        queue.append(place)
        try:
            while not (queue[0] is place and comes()):
                if self._draining and queue is self._turns:
                    return False
                if cancel is not None and cancel():
                    return False
                self._changed.wait(_PATIENCE)
            return True
        finally:
            queue.remove(place)
            self._changed.notify_all()

    def _may_run(self, wanted: int) -> bool:
        free = self._num_seqs - self._held() - self._borrowed().num_seqs - self._replies
        return self._running < self._max_turns and wanted <= free

    def _fits(self, count: int) -> bool:
        borrowed = self._borrowed().num_cells
        alone = not self._reserved and not borrowed
        return alone or self._reserved + count <= self._num_cells - borrowed

    def _refuse(self) -> None:
        if self._draining:
            raise Draining("the service is being ended, and takes no more turns")

    def _retry_after(self) -> float:
        """Seconds until about as many have ended as wait."""
        return max(1.0, self._seconds * (len(self._turns) + 1) / self._max_turns)
