"""Turns that were said and cannot be stored any more: whoever asks for their session next is told, once."""

from __future__ import annotations

import threading

from engine.errors import TenutoError

#: Of what is to be told so much is remembered.
_MOST = 1000


class Lost:
    """By tenant and session, why its last turn was lost when nobody waited for it. Safe from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._why: dict[tuple[str, str], TenutoError] = {}

    def add(self, tenant: str, session: str, error: TenutoError) -> None:
        with self._lock:
            self._why[tenant, session] = error
            while len(self._why) > _MOST:
                del self._why[next(iter(self._why))]

    def holds(self, tenant: str) -> bool:
        """Whether there is anything to tell of the tenant's sessions."""
        with self._lock:
            return any(key[0] == tenant for key in self._why)

    def tell(self, tenant: str, session: str) -> None:
        """Raise why the session's last turn was lost, if it was and nobody was told."""
        with self._lock:
            error = self._why.pop((tenant, session), None)
        if error is not None:
            raise error
