"""Where a turn takes place: a tenant's sessions, and the engine as its calls of one salt see it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.shared import SharedEngine
from sessions.manager import SessionManager


@dataclass(frozen=True, slots=True)
class Place:
    """Sequences of `engine` share rows within one `scope` alone; `manager` is of the same tenant and salt."""

    tenant: str
    scope: str
    engine: SharedEngine
    manager: SessionManager
