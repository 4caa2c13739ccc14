"""The same job for many items, by a few threads, as if one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

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
