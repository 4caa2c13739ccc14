"""What tenants have stored, by tier: asked of their stores now and then, since it takes a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from engine.errors import TenutoError
from serialization.blobs import TierInfo
from sessions.manager import SessionManager

#: Seconds that figures are told for before they are asked for anew, and how much longer than it took to ask.
_FRESH, _TIMES = 60.0, 20.0
#: Seconds that the end waits for who is asking.
_PATIENCE = 10.0


@dataclass(frozen=True, slots=True)
class Figures:
    """By tenant, what each tier had, `age` seconds ago (None: nobody was asked yet). A tenant whose store
    could not be asked is missing."""

    tiers: Mapping[str, tuple[TierInfo, ...]] = field(default_factory=dict)
    age: float | None = None


class Storage:
    """Safe from many threads. Nobody waits for figures: who asks is told those that are known, and has them
    taken anew in the background where they are old."""

    def __init__(
        self,
        managed: Callable[[str], AbstractContextManager[SessionManager]],
        tenants: Callable[[], Iterable[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._managed = managed
        self._tenants = tenants
        self._clock = clock
        self._lock = threading.Lock()
        self._tiers: Mapping[str, tuple[TierInfo, ...]] = {}
        self._asked: float | None = None
        self._took = 0.0
        self._asking: threading.Thread | None = None
        self._closed = False

    def figures(self) -> Figures:
        with self._lock:
            if self._is_old() and self._asking is None and not self._closed:
                self._asking = threading.Thread(target=self._ask, name="storage", daemon=True)
                self._asking.start()
            return Figures(self._tiers, None if self._asked is None else self._clock() - self._asked)

    def close(self) -> None:
        """Ask no more stores."""
        with self._lock:
            self._closed, asking = True, self._asking
        if asking is not None:
            asking.join(_PATIENCE)

    def _is_old(self) -> bool:
        return self._asked is None or self._clock() - self._asked >= max(_FRESH, _TIMES * self._took)

    def _ask(self) -> None:
        started, tiers = self._clock(), {}
        try:
            for tenant in sorted(set(self._tenants())):
                if self._closed:
                    return
                try:
                    with self._managed(tenant) as manager:
                        tiers[tenant] = manager.store.tiers()
                except TenutoError:
                    continue  # its requests tell of it
        finally:
            with self._lock:
                self._tiers, self._asked = tiers, self._clock()
                self._took = self._asked - started
                self._asking = None
