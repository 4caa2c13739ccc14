"""Rows that are read out of a store as they are put in place, each chunk in the memory of the one before."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

import torch

from engine.state import PartKind, Rows
from serialization.parallel import Ahead
from serialization.reading import Reader, Wanted
from serialization.streams import NEW, Buffers, Scratch

#: Decoding takes less than so many times the bytes of its rows: for every codec what it makes, and one copy.
_STEPS = 3


class ArrivingRows:
    """Holds what a reading needs, from its beginning to its end: memory for one chunk, and threads that fetch
    blobs ahead."""

    def __init__(self, reader: Reader, workers: int) -> None:
        """Sizes that are declared are checked here, as `Reader.wanted` does."""
        self._reader = reader
        self._wanted = reader.wanted()
        self._ahead = Ahead(reader.fetched, self._wanted, workers)
        largest = max((each.blob.ref.raw_nbytes for each in self._wanted if each.blob), default=0)
        self._scratch = Scratch(_STEPS * largest)

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

    def __enter__(self) -> ArrivingRows:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ahead.close()


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
