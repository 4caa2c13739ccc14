"""What is kept, for how long, and how it is written."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self

from engine.errors import ConfigError
from serialization.snapshot import POINT_BUDGET

#: Notes cost a write each, and a session that is used is not worth one every turn.
_TOUCH_EVERY = 3600.0


@dataclass(frozen=True, slots=True)
class Policy:
    """Retention and durability of one store, in seconds and bytes; None is without limit.

    rows_ttl      a session not used for so long gives up its rows; text and token ids stay
    session_ttl   a session not used for so long is deleted, unless it is pinned
    budget        bytes that rows may take: the sessions least recently used give theirs up first
    quota         bytes that the tenant may store in all, blobs, refs and index: beyond them nothing is added
    lease         how long a writer's lease lasts without renewal
    grace         how old an unreferenced blob must be before gc may delete it; longer than any lease
    codec         how new chunks are encoded: "default", "fast" or "raw"
    checkpoints   bytes of point state that one turn names at most, before encoding (recurrent models)
    drift         the largest |difference| of canary logits with which a state of another build is believed
    """

    rows_ttl: float | None = None
    session_ttl: float | None = None
    budget: int | None = None
    quota: int | None = None
    lease: float = 30.0
    grace: float = 3600.0
    codec: str = "default"
    checkpoints: int = POINT_BUDGET
    drift: float = 3.0

    def __post_init__(self) -> None:
        for name in ("rows_ttl", "session_ttl", "budget", "quota", "checkpoints"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"policy: {name} = {value} is negative")
        if self.lease <= 0:
            raise ConfigError(f"policy: lease = {self.lease} must be positive")
        if self.grace <= self.lease:
            raise ConfigError(f"policy: grace ({self.grace} s) must be longer than a lease ({self.lease} s)")

    @property
    def touch_every(self) -> float:
        """Seconds within which a further use of a session need not be noted: a small part of any of its
        times to live."""
        ttls = [ttl for ttl in (self.rows_ttl, self.session_ttl) if ttl is not None]
        return min([_TOUCH_EVERY, *(ttl / 10 for ttl in ttls)])

    @classmethod
    def from_mapping(cls, values: dict[str, Any]) -> Self:
        """Raises ConfigError for a key that is not a field."""
        known = {field.name for field in fields(cls)}
        for key in values:
            if key not in known:
                raise ConfigError(f"policy: unknown key {key!r}; known are {', '.join(sorted(known))}")
        return cls(**values)
