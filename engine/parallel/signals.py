"""A pass that many ranks compute together is not left in the middle of it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_WAITING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Deferral:
    """From `begin` to `end` signals that Python handles wait. `end` hands them on, and so may raise what
    their handlers do. Outside of the main thread, which alone they reach, it does nothing."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._caught: list[tuple[int, FrameType | None]] = []

    def begin(self) -> None:
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        for number in _WAITING:
            if callable(signal.getsignal(number)):
                self._before[number] = signal.signal(number, self._catch)

    def end(self) -> None:
        """Also where nothing has begun."""
        before, caught = self._before, self._caught
        self._before, self._caught = {}, []
        for number, handler in before.items():
            signal.signal(number, handler)
        for number, frame in caught:
            before[number](number, frame)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self._caught.append((number, frame))


@contextmanager
def undivided() -> Iterator[None]:
    """Signals wait until this is done."""
    deferral = Deferral()
    deferral.begin()
    try:
        yield
    finally:
        deferral.end()
