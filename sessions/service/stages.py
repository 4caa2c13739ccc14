"""The stages of a turn, for who wants to know what it spends its time with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import Protocol

#: Of a stage: a count, a reason or an id, never a word of what was said.
Noted = str | int | float | bool


class Stage(StrEnum):
    """One after the other; between them a turn waits for others."""

    RESTORE = "restore"  # until its past is in memory
    PREFILL = "prefill"  # until what is new of its prompt was read
    DECODE = "decode"  # until its replies were said, and taken by who reads them
    SAVE = "save"


class Note(Protocol):
    """Takes what there is to tell of a stage."""

    def __call__(self, **noted: Noted) -> None: ...


#: Called as a stage begins; what it returns is left as the stage ends, with the error that ended it, if any.
Watch = Callable[[Stage], AbstractContextManager[Note]]


def unwatched(stage: Stage) -> AbstractContextManager[Note]:
    return nullcontext(_forget)


def _forget(**noted: Noted) -> None:
    """Nobody is told."""
