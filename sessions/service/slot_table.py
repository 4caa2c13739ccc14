"""Which sessions llama-server's slots stand for: the last ones that a tenant talked in, here."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from engine.errors import UsageError
from sessions.service.told import Said, Told

#: Tenants whose slots are remembered; those that talked longest ago are forgotten first.
_TENANTS = 1024


@dataclass(frozen=True, slots=True)
class Slot:
    """`used` is the number of the last turn in it, counted since the service began; 0 for none."""

    session: str | None = None
    used: int = 0


class SlotTable:
    """`num_slots` of each tenant, in memory alone: they are a view of sessions, which stay what they are.
    Safe from many threads."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._tenants: OrderedDict[str, list[Slot]] = OrderedDict()
        self._lock = threading.Lock()
        self._at_work: Counter[tuple[str, str]] = Counter()
        self._clock = 0

    def check(self, slot: int) -> None:
        """Raises UsageError unless there is this slot."""
        if not 0 <= slot < self.num_slots:
            raise UsageError(f"there is no slot {slot}, only 0 to {self.num_slots - 1}", param="id_slot")

    def of(self, tenant: str) -> tuple[Slot, ...]:
        with self._lock:
            return tuple(self._slots(tenant))

    def put(self, tenant: str, session: str, slot: int | None = None) -> int:
        """A turn of `session` was said, in `slot` if the client wanted that one. Returns the slot's number:
        the one that has the session already, failing that an empty one, failing that the longest unused."""
        with self._lock:
            slots = self._slots(tenant)
            self._clock += 1
            held = next((at for at, each in enumerate(slots) if each.session == session), None)
            if slot is None:
                slot = held if held is not None else min(range(len(slots)), key=lambda at: slots[at].used)
            if held is not None and held != slot:
                slots[held] = Slot()
            slots[slot] = Slot(session, self._clock)
            return slot

    @contextmanager
    def turn(self, tenant: str, slot: int | None = None) -> Iterator[Callable[[Told], None]]:
        """For as long as a turn runs; gives what is to be told of it. `slot` is the one that it is to be
        said in, if the client wants one."""
        at_work: str | None = None

        def heard(told: Told) -> None:
            nonlocal at_work
            if isinstance(told, Said) or told.session is None:
                return
            self.put(tenant, told.session, slot)
            if at_work is None:
                at_work = told.session
                with self._lock:
                    self._at_work[tenant, at_work] += 1

        try:
            yield heard
        finally:
            if at_work is not None:
                with self._lock:
                    self._at_work[tenant, at_work] -= 1
                    self._at_work += Counter()  # without those that count nothing

    def at_work(self, tenant: str, session: str) -> bool:
        with self._lock:
            return self._at_work[tenant, session] > 0

    def empty(self, tenant: str, slot: int) -> None:
        with self._lock:
            self._slots(tenant)[slot] = Slot()

    def _slots(self, tenant: str) -> list[Slot]:
        slots = self._tenants.setdefault(tenant, [Slot()] * self.num_slots)
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > _TENANTS:
            self._tenants.popitem(last=False)
        return slots
