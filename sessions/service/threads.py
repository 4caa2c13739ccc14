"""The threads in which the blocking backend is called, so that the event loop never waits."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """Some for what takes a moment, so that a list of sessions never waits for a reply, and one for each
    request that takes as long as a model or a client does."""

    def __init__(self, num_long: int, num_short: int) -> None:
        self._long = ThreadPoolExecutor(num_long, "long")
        self._short = ThreadPoolExecutor(num_short, "short")

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `function` returns or raises, called in a thread. That its caller is gone does not end it."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._short, functools.partial(function, *args, **kwargs))

    async def call_long(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The same for what may take minutes."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._long, functools.partial(function, *args, **kwargs))

    def start(self, function: Callable[[], None]) -> None:
        """Run what may take minutes, and must not raise."""
        self._long.submit(function)

    def close(self) -> None:
        """Wait until all that was begun has ended."""
        self._long.shutdown(cancel_futures=True)
        self._short.shutdown(cancel_futures=True)
