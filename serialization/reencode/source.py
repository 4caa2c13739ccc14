"""Rows of a stored state in any cut, one stored chunk of each kind in memory at a time."""

from __future__ import annotations

from engine.state import PartKind, Rows, parts_of
from serialization.blobs import Store
from serialization.chunks import decode_rows
from serialization.reading import check_size, get
from serialization.refs import BlobRef, Stored


class SourceRows:
    """Reads `stored` out of `store`. Who asks from front to back has each blob read once."""

    def __init__(self, store: Store, stored: Stored) -> None:
        self._store = store
        self._stored = stored
        self._by_start = {chunk.start: chunk for chunk in stored.chunks}
        self._last: dict[PartKind, tuple[int, Rows]] = {}

    def ref(self, kind: PartKind, start: int, stop: int) -> BlobRef | None:
        """The blob of a chunk that has just the rows of tokens [start, stop), if there is one."""
        size = self._stored.chunk_tokens
        chunk = self._by_start.get(start // size * size)
        if chunk is None or chunk.stop != stop:
            return None
        blob = chunk.blob(kind)
        return blob.ref if blob is not None and blob.start == start else None

    def runs(self, kind: PartKind, start: int, stop: int) -> tuple[Rows, ...]:
        """Consecutive runs that cover tokens [start, stop), which are all named. Raises BlobMissing, Corrupt
        and other StateErrors, StoreUnavailable."""
        size = self._stored.chunk_tokens
        runs = []
        for at in range(start // size * size, stop, size):
            rows = self._rows(kind, at)
            if rows is not None:
                runs.append(rows)
        return tuple(runs)

    def _rows(self, kind: PartKind, start: int) -> Rows | None:
        """Those of one chunk; None where it is too short for one."""
        chunk = self._by_start[start]
        blob = chunk.blob(kind)
        if blob is None:
            return None
        last = self._last.get(kind)
        if last is not None and last[0] == start:
            return last[1]
        specs = parts_of(self._stored.layout, kind)
        check_size(blob, chunk, specs)
        rows = decode_rows(get(self._store, blob.ref), kind, specs, blob.start, chunk.stop)
        self._last[kind] = start, rows
        return rows
