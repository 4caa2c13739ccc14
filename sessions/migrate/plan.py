"""What a migration would do, and why, before it does anything."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Fate(StrEnum):
    """What becomes of something on its way."""

    KEPT = "kept"
    CONVERTED = "converted"
    DROPPED = "dropped"
    RECOMPUTED = "recomputed"
    REFUSED = "refused"
    THERE = "there already"


@dataclass(frozen=True, slots=True)
class Item:
    """So many of one kind of thing share a fate, and why. `nbytes` of what is stored of them, where that is
    known; `examples` are a few of them."""

    fate: Fate
    what: str
    count: int
    why: str
    nbytes: int | None = None
    examples: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """What would be done from `source` to `target`. `nbytes` is about what would be written: of what sessions
    share once, as it is stored in the source. `clashes` are sessions and kept turns in whose place something
    else is; with any of them nothing is begun."""

    source: str
    target: str
    tenant: str
    items: tuple[Item, ...]
    num_sessions: int
    nbytes: int
    clashes: tuple[str, ...] = ()

    def of(self, fate: Fate) -> tuple[Item, ...]:
        return tuple(item for item in self.items if item.fate is fate)
