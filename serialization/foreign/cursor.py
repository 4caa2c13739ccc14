"""A bounded reader over the bytes of a foreign file: nothing is read, or allocated, beyond what is there."""

from __future__ import annotations

import mmap
import struct

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import Corrupt, LimitExceeded, StateError

Words = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Bytes = bytes | bytearray | memoryview | mmap.mmap


def writable(buffer: Bytes) -> memoryview:
    """The buffer as bytes that tensors may be views of.

    Tensors know no read-only memory, so a read-only buffer is copied, once. A file that is mapped with
    `mmap.ACCESS_COPY` is not, and nothing here writes to it.
    """
    view = memoryview(buffer)
    return memoryview(bytearray(view)) if view.readonly else view.cast("B")


class Cursor:
    """Little-endian values from `at` on. Every error says at which byte, and what was to be there.

    Arrays and tensors are views of the buffer: they keep it alive, and change if it does.
    """

    def __init__(self, data: memoryview, at: int = 0) -> None:
        self.data = data
        self.at = at

    @property
    def left(self) -> int:
        """Bytes not read yet."""
        return len(self.data) - self.at

    def corrupt(self, why: str, at: int | None = None) -> StateError:
        where = self.at if at is None else at
        return Corrupt(f"at byte {where}: {why}", offset=where)

    def exceeded(self, why: str, at: int) -> StateError:
        return LimitExceeded(f"at byte {at}: {why}", offset=at)

    def u32(self, what: str) -> int:
        return self._integer("<I", 4, what)

    def i32(self, what: str) -> int:
        return self._integer("<i", 4, what)

    def u64(self, what: str) -> int:
        return self._integer("<Q", 8, what)

    def count(self, what: str, each: int, limit: int | None = None) -> int:
        """A u32 that counts things of at least `each` bytes which follow: raises `Corrupt` where so many
        bytes are not left, `LimitExceeded` beyond `limit`."""
        at = self.at
        number = self.u32(f"the number of {what}")
        if limit is not None and number > limit:
            raise self.exceeded(f"{number} {what}, where {limit} are allowed", at)
        if number * each > self.left:
            raise self.corrupt(f"{number} {what} cannot be in the {self.left} bytes that are left", at)
        return number

    def take(self, nbytes: int, what: str) -> memoryview:
        if nbytes > self.left:
            raise self.corrupt(f"{what} should be {nbytes} bytes, and {self.left} are left")
        start, self.at = self.at, self.at + nbytes
        return self.data[start : self.at]

    def words(self, count: int, what: str) -> Words:
        """int32 [count]."""
        return np.frombuffer(self.take(4 * count, what), "<i4")

    def floats(self, count: int, what: str) -> Floats:
        """float32 [count]."""
        return np.frombuffer(self.take(4 * count, what), "<f4")

    def rows(self, count: int, nbytes: int, what: str) -> torch.Tensor:
        """uint8 [count, nbytes]."""
        taken = self.take(count * nbytes, what)
        if not len(taken):
            return torch.empty((count, nbytes), dtype=torch.uint8)
        return torch.frombuffer(taken, dtype=torch.uint8).view(count, nbytes)

    def _integer(self, form: str, nbytes: int, what: str) -> int:
        value: int = struct.unpack(form, self.take(nbytes, what))[0]
        return value
