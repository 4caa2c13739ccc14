"""Rows that are read out of a store as they are put in place, each chunk in the memory of one before."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

import torch

from engine.state import PartKind, Rows
from serialization.ahead import Ahead
from serialization.buffers import NEW, Buffers, Scratch, Spares
from serialization.chunks import Unpacked
from serialization.reading import Reader, Wanted

#: Bytes of memory that is kept for the next reading: what one takes that reads chunks of 8 MB.
_SPARES = Spares(2**26)
#: Bytes that blobs may take which are fetched ahead out of a slow store, but for the first two.
_AHEAD = 2**28


class ArrivingRows:
    """Holds what a reading needs, from its beginning to its end: memory for a few chunks, and the threads
    that fetch and unpack blobs ahead."""

    def __init__(self, reader: Reader, workers: int) -> None:
        """Sizes that are declared are checked here, as `Reader.wanted` does."""
        self._reader = reader
        self._wanted = reader.wanted()
        refs = [each.blob.ref for each in self._wanted if each.blob]
        made = _made_nbytes(max((ref.raw_nbytes for ref in refs), default=0))
        place = max((ref.nbytes for ref in refs), default=0) + made
        workers = max(1, min(workers, _AHEAD // place))
        self._ahead = Ahead(self._unpacked, self._wanted, workers, lambda: _SPARES.lend(place))
        self._scratch = _SPARES.lend(made)

    @property
    def runs(self) -> tuple[ArrivingRun, ...]:
        """Good until the end of this reading."""
        return tuple(ArrivingRun(self, index, wanted) for index, wanted in enumerate(self._wanted))

    def read(self, index: int) -> Rows:
        """In memory that the next reading takes again. Raises BlobMissing, Corrupt and other StateErrors,
        StoreUnavailable."""
        self._scratch.begin()
        return self._read(index, self._scratch)

    def keep(self, index: int) -> Rows:
        """In memory of its own. Raises as `read`."""
        return self._read(index, NEW)

    def _read(self, index: int, buffers: Buffers) -> Rows:
        return self._reader.decoded(self._wanted[index], self._ahead.take(index), buffers)

    def _unpacked(self, wanted: Wanted, place: Scratch) -> Unpacked | None:
        place.begin()
        return self._reader.unpacked(wanted, place)

    def __enter__(self) -> ArrivingRows:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _SPARES.give_back([*self._ahead.close(), self._scratch])


def _made_nbytes(raw_nbytes: int) -> int:
    """What unpacking makes of a blob of so many bytes of rows, or decoding of its streams, at most: the rows,
    and half as much again where exponents are put right. And a little, since every piece is aligned."""
    return raw_nbytes * 3 // 2 + 4096


@dataclass(frozen=True, slots=True)
class ArrivingRun:
    """See `engine.state.Run`."""

    _rows: ArrivingRows
    _index: int
    _wanted: Wanted

    @property
    def kind(self) -> PartKind:
        return self._wanted.kind

    @property
    def start(self) -> int:
        return self._wanted.start

    @property
    def stop(self) -> int:
        return self._wanted.stop

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        return self._rows.read(self._index).parts

    def kept(self) -> Rows:
        return self._rows.keep(self._index)
