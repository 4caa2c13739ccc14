"""How much a tenant may ask for in a minute: requests, and tokens that are computed for it."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

#: Tenants that are remembered; those that asked longest ago are forgotten first.
_TENANTS = 4096


@dataclass(slots=True)
class _Left:
    """What is left at a moment; below zero for what was given before it could be counted."""

    amount: float
    at: float


class Rate:
    """`per_minute` at once, and then as they come back, evenly; None for without limit. Safe from many
    threads."""

    def __init__(self, per_minute: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = per_minute, clock
        self._tenants: OrderedDict[str, _Left] = OrderedDict()
        self._lock = threading.Lock()

    def wait(self, tenant: str, wanted: float = 1) -> float | None:
        """None if there is as much as is wanted (or all that there can be); else in how many seconds there
        will be. Takes nothing."""
        if self._most is None:
            return None
        with self._lock:
            lacking = min(wanted, self._most) - self._left(tenant, self._most).amount
            return lacking * 60 / self._most if lacking > 1e-9 else None

    def take(self, tenant: str, amount: float = 1) -> None:
        if self._most is not None:
            with self._lock:
                self._left(tenant, self._most).amount -= amount

    def _left(self, tenant: str, most: float) -> _Left:
        now = self._clock()
        left = self._tenants.setdefault(tenant, _Left(most, now))
        left.amount = min(most, left.amount + (now - left.at) * most / 60)
        left.at = now
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > _TENANTS:
            self._tenants.popitem(last=False)
        return left
