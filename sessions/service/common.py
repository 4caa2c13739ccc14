"""What all turns of a backend have in common."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from engine.generation import Cancel
from sessions.service.admission import Admission
from sessions.service.choosers import Choosers
from sessions.service.lost import Lost
from sessions.service.planner import Planner
from sessions.service.residents import Residents
from sessions.service.write_back import WriteBack


@dataclass(frozen=True, slots=True)
class Common:
    """`ending` is set when replies have to end, whatever their readers want; for `patience` seconds a
    turn waits for another one in its session. Without `write_back` every turn is saved before it ends."""

    admission: Admission
    residents: Residents
    lost: Lost
    planner: Planner
    choosers: Choosers
    ending: threading.Event
    patience: float
    write_back: WriteBack | None = None

    def cancel(self, asked: Cancel | None) -> Cancel:
        """Whether a turn should end: its reader says so, or the backend is being closed."""
        if asked is None:
            return self.ending.is_set
        return lambda: self.ending.is_set() or asked()
