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
    """So many for turns, which may take minutes, and others for the rest, so that a list of sessions never
    waits for a reply."""

    def __init__(self, num_turns: int, num_verbs: int) -> None:
        self._turns = ThreadPoolExecutor(num_turns, "turn")
        self._verbs = ThreadPoolExecutor(num_verbs, "verb")

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `function` returns or raises, called in a thread. That its caller is gone does not end it."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._verbs, functools.partial(function, *args, **kwargs))

    def start(self, function: Callable[[], None]) -> None:
        """Run a turn, which must not raise."""
        self._turns.submit(function)

    def close(self) -> None:
        """Wait until all that was begun has ended."""
        self._turns.shutdown(cancel_futures=True)
        self._verbs.shutdown(cancel_futures=True)
