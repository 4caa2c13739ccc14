"""Where a turn takes place: a tenant's sessions, and the engine as its calls of one salt see it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.shared import SharedEngine
from sessions.manager import SessionManager


@dataclass(frozen=True, slots=True)
class Place:
    """Sequences of `engine` share rows within its scope alone: that of `manager`'s tenant and salt."""

    engine: SharedEngine
    manager: SessionManager

    @property
    def tenant(self) -> str:
        return self.manager.tenant

    @property
    def scope(self) -> str:
        return self.engine.scope

    @property
    def salt(self) -> str | None:
        return self.manager.salt

    def of(self, salt: str | None) -> Place:
        """The same tenant's place of this salt (see `salts`)."""
        if salt == self.salt:
            return self
        engine = self.engine.within(scope_of(self.tenant, salt))
        return Place(engine, self.manager.salted(engine, salt))


def scope_of(tenant: str, salt: str | None) -> str:
    return f"{tenant}\0{salt or ''}"
