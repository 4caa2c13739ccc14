"""Memory that blobs are read into and decoded in: new, or such that is used again."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

Stream = npt.NDArray[np.uint8]  # one axis, contiguous


class Buffers(Protocol):
    """Where what is decoded lies."""

    def take(self, nbytes: int) -> Stream:
        """uint8 [nbytes] with anything in it."""
        ...


class NewBuffers:
    """Memory of its own for everything that is decoded."""

    def take(self, nbytes: int) -> Stream:
        return np.empty(nbytes, np.uint8)


NEW = NewBuffers()


class Scratch:
    """Memory for one decoding after another, by one thread at a time: the first touch of fresh pages costs as
    much as what is decoded into them. It is taken piece by piece, and given back all at once."""

    def __init__(self, nbytes: int) -> None:
        """Room for `nbytes` in one piece, of which the system gives what is touched; what goes beyond it has
        memory of its own."""
        self._room = NEW.take(nbytes)
        self._taken = 0

    @property
    def nbytes(self) -> int:
        return len(self._room)

    def take(self, nbytes: int) -> Stream:
        """See `Buffers`. It is its taker's until `begin`."""
        start = -(-self._taken // _ALIGNMENT) * _ALIGNMENT
        if start + nbytes > len(self._room):
            return NEW.take(nbytes)
        self._taken = start + nbytes
        return self._room[start : start + nbytes]

    def begin(self) -> None:
        """Everything is free again: what was taken before will be written over."""
        self._taken = 0


#: bytes; a processor's cache line
_ALIGNMENT = 64


class Spares:
    """Scratch memory that is lent, and kept for who comes next; any thread may ask."""

    def __init__(self, budget: int) -> None:
        """At most `budget` bytes are kept while nobody has them."""
        self._budget = budget
        self._kept: list[Scratch] = []
        self._lock = threading.Lock()

    def lend(self, nbytes: int) -> Scratch:
        """One with room for `nbytes`, and anything in it."""
        with self._lock:
            fitting = [scratch for scratch in self._kept if scratch.nbytes >= nbytes]
            if fitting:
                found = min(fitting, key=lambda scratch: scratch.nbytes)
                self._kept.remove(found)
                return found
        return Scratch(nbytes)

    def give_back(self, scratches: Iterable[Scratch]) -> None:
        """Who had them has no view of them any more. The ones that came last are kept."""
        with self._lock:
            for scratch in scratches:
                if scratch not in self._kept:
                    self._kept.append(scratch)
            while sum(scratch.nbytes for scratch in self._kept) > self._budget:
                del self._kept[0]
