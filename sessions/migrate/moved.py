"""What a migration tells: how far it is, and what it did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Problem:
    """A session (or kept turn) that was left out, by its ref in the source, and why."""

    ref: str
    message: str


@dataclass(frozen=True, slots=True)
class Progress:
    """So many of the sessions and kept turns to be moved are done, and so many bytes were written."""

    done: int
    total: int
    nbytes: int


#: Is told how far it is.
Told = Callable[[Progress], object]


@dataclass(slots=True)
class Moved:
    """What was done. `before` were there already, from an earlier run or as the same; `ahead` went on in the
    destination, and `gone` were deleted there: both are left as they are. `again` were carried once more,
    because the source had moved on. `skipped` had something else in their place; `expired` were lost by the
    source, as it may. `writing` are being written to in the source now: what is said there from now on stays
    there. `session` is the id of the one that was made, where it was one."""

    num_sessions: int = 0
    num_pins: int = 0
    nbytes: int = 0
    before: int = 0
    ahead: int = 0
    gone: int = 0
    again: int = 0
    skipped: int = 0
    expired: int = 0
    lost_blobs: int = 0
    writing: tuple[str, ...] = ()
    session: str | None = None
    problems: list[Problem] = field(default_factory=list)
