"""A store seen at one moment: who writes to it, how many sessions there are, and what they take."""

from __future__ import annotations

import time
from dataclasses import dataclass

from serialization.blobs import Store
from sessions import names
from sessions.lease import LEASES, read_lease


@dataclass(frozen=True, slots=True)
class Writing:
    """A session that somebody holds, for so many seconds more unless that is renewed."""

    session: str
    holder: str
    seconds: float


@dataclass(frozen=True, slots=True)
class StoreMoment:
    """A store at `at` (seconds, of a clock that only goes forward). `saved` sessions stand elsewhere than at
    the look before, or are new; None at the first. `nbytes` is all that the tenant's part takes."""

    at: float
    num_sessions: int
    num_pins: int
    saved: int | None
    writing: tuple[Writing, ...]
    nbytes: int


class StoreWatch:
    """Looks at one tenant's store, by its refs alone: nothing that is stored is read."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._before: dict[str, int] | None = None

    def look(self) -> StoreMoment:
        """Takes as long as listing all sessions and blobs. Raises IndexDamaged, StoreUnavailable."""
        # Hashes of where sessions stand: all of them are remembered, and none is followed.
        stand = {ref: hash(value) for ref, value in self._store.list_refs(names.SESSIONS)}
        before, self._before = self._before, stand
        saved = None if before is None else sum(before.get(ref) != value for ref, value in stand.items())
        pins = sum(1 for _ in self._store.list_refs(names.PINS))
        return StoreMoment(time.monotonic(), len(stand), pins, saved, self._writing(), self._store.usage())

    def _writing(self) -> tuple[Writing, ...]:
        now, found = self._store.now(), []
        for ref, _ in self._store.list_refs(LEASES):
            session = ref.removeprefix(LEASES)
            lease = read_lease(self._store, session)
            if lease is not None and lease.until > now:
                found.append(Writing(session, lease.holder, lease.until - now))
        return tuple(found)
