"""Rows of a stored state in any cut, one stored chunk of each kind in memory at a time."""

from __future__ import annotations

from bisect import bisect_right
from itertools import islice, takewhile

from engine.state import PartKind, Rows, parts_of
from serialization.blobs import Store
from serialization.chunks import decode_rows
from serialization.reading import check_size, get
from serialization.refs import BlobRef, ChunkRef, Stored


class SourceRows:
    """Reads `stored` out of `store`. Who asks from front to back has each blob read once."""

    def __init__(self, store: Store, stored: Stored) -> None:
        self._store = store
        self._stored = stored
        self._last: dict[PartKind, Rows] = {}

    def ref(self, kind: PartKind, start: int, stop: int) -> BlobRef | None:
        """The blob of a chunk that has just the rows of tokens [start, stop), if there is one."""
        found = self._chunks(start, stop)
        blob = found[0].blob(kind) if len(found) == 1 and found[0].stop == stop else None
        return blob.ref if blob is not None and blob.start == start else None

    def runs(self, kind: PartKind, start: int, stop: int) -> tuple[Rows, ...]:
        """Consecutive runs that cover tokens [start, stop), which are all named. Raises BlobMissing, Corrupt
        and other StateErrors, StoreUnavailable."""
        rows = (self._rows(kind, chunk) for chunk in self._chunks(start, stop))
        return tuple(each for each in rows if each is not None)

    def _chunks(self, start: int, stop: int) -> tuple[ChunkRef, ...]:
        """Those that have some of tokens [start, stop)."""
        chunks = self._stored.chunks
        first = bisect_right(chunks, start, key=lambda chunk: chunk.stop)
        return tuple(takewhile(lambda chunk: chunk.start < stop, islice(chunks, first, None)))

    def _rows(self, kind: PartKind, chunk: ChunkRef) -> Rows | None:
        """Those of one chunk; None where it is too short for one."""
        blob = chunk.blob(kind)
        if blob is None:
            return None
        last = self._last.get(kind)
        if last is not None and (last.start, last.stop) == (blob.start, chunk.stop):
            return last
        specs = parts_of(self._stored.layout, kind)
        check_size(blob, chunk, specs)
        rows = decode_rows(get(self._store, blob.ref), kind, specs, blob.start, chunk.stop)
        self._last[kind] = rows
        return rows
