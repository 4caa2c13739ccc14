"""`Planner`: whether stored rows are read, or their tokens, whichever takes less time here and now."""

from __future__ import annotations

import statistics
import threading
from collections import deque
from dataclasses import dataclass

from serialization.manifest import Manifest

#: So many of the last measurements count.
_LAST = 16
#: Rows that were read again have to be stored again: it must be worth that.
_WORTH = 1.5
#: After so many times the other way a restore is done all the same: what is never done is not measured.
_TRY_AGAIN = 16


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds, by what was measured so far; None where nothing was."""

    restore: float | None
    recompute: float | None

    @property
    def recompute_is_faster(self) -> bool:
        if self.restore is None or self.recompute is None:
            return False
        return self.recompute * _WORTH < self.restore


class Planner:
    """Moving medians of stored bytes that were read, checked and put into memory a second, and of tokens that
    were. Safe from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._restored: deque[float] = deque(maxlen=_LAST)
        self._computed: deque[float] = deque(maxlen=_LAST)
        self._passed_over = 0

    def restored(self, nbytes: int, seconds: float) -> None:
        """A restore of `nbytes`, as stored, took `seconds`."""
        if nbytes and seconds > 0:
            with self._lock:
                self._restored.append(nbytes / seconds)
                self._passed_over = 0

    def computed(self, tokens: int, seconds: float) -> None:
        """To read `tokens` took `seconds`, beside whatever else was computed."""
        if tokens and seconds > 0:
            with self._lock:
                self._computed.append(tokens / seconds)

    @property
    def restore_speed(self) -> float | None:
        """Stored bytes a second; None before the first."""
        with self._lock:
            return statistics.median(self._restored) if self._restored else None

    @property
    def compute_speed(self) -> float | None:
        """Tokens a second; None before the first."""
        with self._lock:
            return statistics.median(self._computed) if self._computed else None

    def estimate(self, manifest: Manifest) -> Estimate:
        restore, compute = self.restore_speed, self.compute_speed
        return Estimate(
            None if restore is None else nbytes_of(manifest) / restore,
            None if compute is None else manifest.length / compute,
        )

    def passes_over(self, estimate: Estimate) -> bool:
        """Whether the rows are left where they are, and the tokens read. Now and then it says no, so that it
        does not go by what was measured long ago."""
        if not estimate.recompute_is_faster:
            return False
        with self._lock:
            self._passed_over = (self._passed_over + 1) % _TRY_AGAIN
            return self._passed_over != 0


def nbytes_of(manifest: Manifest) -> int:
    """Stored bytes that a restore of all of it reads."""
    return sum(ref.nbytes for ref in manifest.blobs())
