"""Work that is done ahead of who takes it, by other threads, in memory that is used again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Item = TypeVar("Item")
Place = TypeVar("Place")
Result = TypeVar("Result")

#: Jobs in a row that were waited for while they slept: one may be a processor that others use as well.
_OFTEN = 2


class Ahead(Generic[Item, Place, Result]):
    """`job` of items that one thread takes one after another, while another does it for the next two; where
    the job sleeps rather than works, as over a network, up to `workers` threads for so many more.

    Every job has a place to itself: it is taken up again once the result of the next job is taken.
    """

    def __init__(
        self,
        job: Callable[[Item, Place], Result],
        items: Sequence[Item],
        workers: int,
        place: Callable[[], Place],
    ) -> None:
        self._job = job
        self._items = items
        self._workers = workers
        self._place = place
        self._free: list[Place] = []
        self._lent: Place | None = None
        self._running: dict[int, tuple[Future[tuple[Result, bool]], Place]] = {}
        self._num_threads, self._num_late = 1, 0
        self._pools = [ThreadPoolExecutor(1)]  # which begins no thread before there is work for it

    def take(self, index: int) -> Result:
        """Good until the next one is taken. Raises what the job of this item raises."""
        before, self._lent = self._lent, None  # in this order: nothing may ever have a place twice
        if before is not None:
            self._free.append(before)
        ready = self._running.pop(index, None)
        self._begin(range(index + 1, min(index + 2 + self._num_threads, len(self._items))))
        if ready is None:
            place = self._lent = self._found_place()
            return self._job(self._items[index], place)
        future, self._lent = ready
        waited = not future.done()
        result, slept = future.result()
        self._count(waited and slept)
        return result

    def close(self) -> list[Place]:
        """No job runs any more. Returns all places that there were."""
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)
        lent = [] if self._lent is None else [self._lent]
        return [*self._free, *lent, *(place for _, place in self._running.values())]

    def _begin(self, following: range) -> None:
        """Where items are taken in another order, what was done for nothing makes room."""
        for index in [each for each in self._running if each not in following]:
            future, place = self._running.pop(index)
            if not future.cancel():
                future.exception()
            self._free.append(place)
        for index in following:
            if index not in self._running:
                place = self._found_place()
                self._running[index] = self._pools[-1].submit(self._timed, self._items[index], place), place

    def _timed(self, item: Item, place: Place) -> tuple[Result, bool]:
        """Besides, whether most of the time was spent without the processor."""
        started, worked = time.perf_counter(), time.thread_time()
        result = self._job(item, place)
        return result, 2 * (time.thread_time() - worked) < time.perf_counter() - started

    def _found_place(self) -> Place:
        return self._free.pop() if self._free else self._place()

    def _count(self, late: bool) -> None:
        """Twice the threads where a job was late again; what those before have begun, they end."""
        self._num_late = self._num_late + 1 if late else 0
        if self._num_late >= _OFTEN and self._num_threads < self._workers:
            self._num_late = 0
            self._num_threads = min(2 * self._num_threads, self._workers)
            self._pools[-1].shutdown(wait=False)
            self._pools.append(ThreadPoolExecutor(self._num_threads))
