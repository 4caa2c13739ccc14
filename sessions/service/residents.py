"""`Residents`: conversations that stay in the engine's memory between two turns, as long as it has room."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from engine.slots import Resting
from sessions.catalog import Entry
from sessions.live import Live
from sessions.service.place import Place


@dataclass(frozen=True, slots=True)
class Resident:
    """A sequence that rests, and the stored turn that it is: its first `synced` tokens have the rows that are
    stored, those of the draft that are of `draft_synced`. It is of the engine's `scope`."""

    scope: str
    entry: Entry
    resting: Resting
    synced: int
    draft_synced: int

    @property
    def session(self) -> str:
        return self.entry.manifest.session


@dataclass(frozen=True, slots=True)
class Unsaved:
    """A conversation whose last turn is in memory alone. It has its lease."""

    place: Place
    live: Live

    @property
    def session(self) -> str:
        return self.live.session.id


class Residents:
    """By tenant and session. All of them are stored, so that any may be forgotten; what could not be stored
    is kept apart, with its lease. Safe from many threads.

    The engine decides whose room is needed: at most so many rest as it has sequences, and the least recently
    used give way. Who is taken here may be gone there.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._resting: OrderedDict[tuple[str, str], Resident] = OrderedDict()
        self._unsaved: dict[tuple[str, str], Unsaved] = {}

    def __len__(self) -> int:
        return len(self._resting)

    @property
    def num_unsaved(self) -> int:
        return len(self._unsaved)

    def put(self, tenant: str, resident: Resident) -> None:
        key = tenant, resident.session
        with self._lock:
            self._resting.pop(key, None)
            self._resting[key] = resident
            while len(self._resting) > self._most:
                self._resting.popitem(last=False)

    def look(self, tenant: str, session: str) -> Resident | None:
        with self._lock:
            return self._resting.get((tenant, session))

    def take(self, tenant: str, session: str) -> Resident | None:
        """The resident, which is the caller's now."""
        with self._lock:
            return self._resting.pop((tenant, session), None)

    # --- what could not be saved --------------------------------------------------------------

    def put_unsaved(self, unsaved: Unsaved) -> None:
        with self._lock:
            self._unsaved[unsaved.place.tenant, unsaved.session] = unsaved

    def unsaved(self) -> list[tuple[str, str]]:
        """Tenant and session of each."""
        with self._lock:
            return list(self._unsaved)

    def num_unsaved_of(self, tenant: str, session: str) -> int:
        """1 or 0."""
        with self._lock:
            return int((tenant, session) in self._unsaved)

    def take_unsaved(self, tenant: str, session: str) -> Unsaved | None:
        with self._lock:
            return self._unsaved.pop((tenant, session), None)

    def take_all_unsaved(self) -> list[Unsaved]:
        with self._lock:
            found = list(self._unsaved.values())
            self._unsaved.clear()
            return found
