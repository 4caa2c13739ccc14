"""The same job for many items, by a few threads, as if one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(job: Callable[[Item], Result], items: Sequence[Item], workers: int) -> list[Result]:
    """`job` of every item, in order, by up to `workers` threads; the first error ends them all."""
    if workers <= 1 or len(items) < 2:
        return [job(item) for item in items]
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(job, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class Ahead(Generic[Item, Result]):
    """`job` of items that are taken one after another by one thread, while others do it for those that
    follow: one thread, and where that is waited for, up to `workers`."""

    def __init__(self, job: Callable[[Item], Result], items: Sequence[Item], workers: int) -> None:
        self._job = job
        self._items = items
        self._workers = workers
        self._pool = ThreadPoolExecutor(workers)  # which begins no thread before there is work for it
        self._running: dict[int, Future[Result]] = {}
        self._reach = 1

    def take(self, index: int) -> Result:
        """Raises what the job of this item raises."""
        future = self._running.pop(index, None)
        if future is not None and not future.done():
            self._reach = min(2 * self._reach, self._workers)
        for following in range(index + 1, min(index + 1 + self._reach, len(self._items))):
            if following not in self._running:
                self._running[following] = self._pool.submit(self._job, self._items[following])
        return self._job(self._items[index]) if future is None else future.result()

    def close(self) -> None:
        """No job runs any more."""
        self._pool.shutdown(cancel_futures=True)
