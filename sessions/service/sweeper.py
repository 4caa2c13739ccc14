"""Retention that runs by itself: every tenant's store is swept now and then, by one process at a time.

A sweep is what `tenuto gc` does: sessions that have outlived their time go, rows beyond the budget too, and
blobs that nothing needs. Processes that share a store agree by two refs: a lease under which one sweeps, and
`swept`, which tells when that was done last, so that many processes do not sweep more often than one.
"""

from __future__ import annotations

import random
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from engine.errors import Erased, LeaseHeld
from sessions.gc import GcResult
from sessions.manager import SessionManager

#: Whose lease one sweeps under. No session's id is like it.
SWEEPER = "sweeper"
SWEPT = "swept"
_TIME = struct.Struct(">d")

#: The first round comes soon after the start, and not at once: many processes may start together.
_SOON = 60.0
#: Seconds.
_PATIENCE = 30.0
#: By so much the time between two rounds differs from what was asked for, either way.
_JITTER = 0.2


@dataclass(frozen=True, slots=True)
class Swept:
    """What came of one tenant's sweep: a result, or what kept it from having one."""

    tenant: str
    seconds: float
    result: GcResult | None
    error: Exception | None


def sweep(manager: SessionManager, every: float) -> GcResult | None:
    """Collect what the manager's policy gives up, unless another process does, or did within about `every`
    seconds: then None. Raises StateError where a manifest cannot be read (nothing is deleted on a guess),
    StoreError."""
    store = manager.store
    try:
        lease = manager.commits.lease(SWEEPER)
    except LeaseHeld:
        return None
    with lease:
        before, now = store.read(SWEPT), store.now()
        if before is not None and len(before) == _TIME.size:
            ago = now - _TIME.unpack(before)[0]
            if 0 <= ago < every * (1 - 2 * _JITTER):
                return None
        result = manager.collect(manager.plan_gc())
        store.hint({SWEPT: _TIME.pack(store.now())})
    return result


class Sweeper:
    """A thread that sweeps each of `tenants` about `every` seconds, and hands what came of it to `told`."""

    def __init__(
        self,
        managed: Callable[[str], AbstractContextManager[SessionManager]],
        tenants: Callable[[], Iterable[str]],
        every: float,
        told: Callable[[Swept], object],
    ) -> None:
        self._managed = managed
        self._tenants = tenants
        self._every = every
        self._told = told
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sweeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop after the tenant that is being swept. One that takes very long is left to itself."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_PATIENCE)

    def round(self) -> None:
        """Sweep every tenant that is due, in an order of its own, so that processes seldom meet."""
        tenants = sorted(set(self._tenants()))
        random.shuffle(tenants)
        for tenant in tenants:
            if self._stop.is_set():
                return
            self._sweep(tenant)

    def _sweep(self, tenant: str) -> None:
        started = time.monotonic()
        result: GcResult | None = None
        failed: Exception | None = None
        try:
            with self._managed(tenant) as manager:
                result = sweep(manager, self._every)
        except Erased:
            return
        except Exception as error:  # a bug, too, must not end the sweeps of all others
            failed = error
        if result is not None or failed is not None:
            self._told(Swept(tenant, time.monotonic() - started, result, failed))

    def _run(self) -> None:
        wait = random.uniform(0.1, 1.0) * min(_SOON, self._every)
        while not self._stop.wait(wait):
            self.round()
            wait = self._every * random.uniform(1 - _JITTER, 1 + _JITTER)
