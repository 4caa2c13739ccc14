"""The blobs of rows and point state of one memory, a target's or a drafter's, put into a store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.state import Layout, PartKind, Point, Rows, least_missed, parts_of
from serialization.blobs import BlobClass, Store
from serialization.chunks import CHUNK_TOKENS, encode_rows, rows_nbytes
from serialization.parallel import in_order
from serialization.pipelines import CodecSet
from serialization.points import encode_point, point_nbytes
from serialization.refs import ROW_KINDS, BlobRef, Checkpoint, ChunkBlob, ChunkRef, chunk_floor


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """Where rows and point state are now, and what was put for it."""

    chunks: tuple[ChunkRef, ...]
    checkpoints: tuple[Checkpoint, ...]
    put: tuple[BlobRef, ...]


@dataclass(frozen=True, slots=True)
class Writer:
    """Makes and puts the blobs of the first `length` tokens: their `rows`, all that no kept chunk has, in
    chunks of `chunk_tokens`."""

    store: Store
    codecs: CodecSet
    layout: Layout
    length: int
    rows: tuple[Rows, ...]
    chunk_tokens: int = CHUNK_TOKENS

    def write(
        self,
        points: Sequence[Point],
        kept: tuple[ChunkRef, ...],
        known: Sequence[Checkpoint],
        budget: int,
        workers: int = 1,
    ) -> WrittenRows:
        """Put what follows the `kept` chunks, and those of `points` that are not `known`. Of both as many are
        named as have `budget` bytes of point state."""
        start = kept[-1].stop if kept else 0
        new = in_order(self.chunk, self._starts(start), workers)
        by_position = {checkpoint.position: checkpoint for checkpoint in known}
        fresh = {point.position: point for point in points if point.position not in by_position}
        each_nbytes = point_nbytes(parts_of(self.layout, PartKind.POINT))
        named = thinned(sorted([*by_position, *fresh]), each_nbytes, budget)
        written = in_order(self.checkpoint, [fresh[at] for at in named if at in fresh], workers)
        by_position.update({checkpoint.position: checkpoint for checkpoint in written})
        put = [blob.ref for chunk in new for blob in chunk.blobs]
        put += [checkpoint.ref for checkpoint in written if checkpoint.ref is not None]
        return WrittenRows((*kept, *new), tuple(by_position[at] for at in named), tuple(put))

    def _starts(self, start: int) -> list[int]:
        """Where what is put from `start` on begins: there, and then at every aligned run."""
        if start == self.length:
            return []
        run = chunk_floor(start, self.chunk_tokens) + self.chunk_tokens
        return [start, *range(run, self.length, self.chunk_tokens)]

    def chunk(self, start: int) -> ChunkRef:
        """The chunk, or piece of one, from `start` on, its blobs put."""
        stop = min(chunk_floor(start, self.chunk_tokens) + self.chunk_tokens, self.length)
        blobs = (self._rows(kind, start, stop) for kind in ROW_KINDS)
        return ChunkRef(start, stop, tuple(blob for blob in blobs if blob is not None))

    def _rows(self, kind: PartKind, start: int, stop: int) -> ChunkBlob | None:
        """The rows of one kind for tokens [start, stop): None where there are none.

        Window rows may begin later: as far back as the state has all of them up to the end of the chunk.
        """
        specs = parts_of(self.layout, kind)
        runs = tuple(run for run in self.rows if run.kind is kind)
        if kind is PartKind.WINDOW:
            start = max(start, _unbroken(runs, stop))
        if start >= stop or not rows_nbytes(specs, start, stop):
            return None
        data = encode_rows(kind, specs, start, stop, runs, self.codecs)
        return ChunkBlob(kind, start, put(self.store, BlobClass.ROWS, rows_nbytes(specs, start, stop), data))

    def checkpoint(self, point: Point) -> Checkpoint:
        specs = parts_of(self.layout, PartKind.POINT)
        if not specs:
            return Checkpoint(point.position, None)
        data = encode_point(specs, point, self.codecs)
        return Checkpoint(point.position, put(self.store, BlobClass.POINT, point_nbytes(specs), data))


def put(store: Store, cls: BlobClass, raw_nbytes: int, data: bytes) -> BlobRef:
    return BlobRef(store.put(cls, data), raw_nbytes, len(data))


def thinned(positions: Sequence[int], each_nbytes: int, budget: int) -> tuple[int, ...]:
    """As many of the checkpoints at `positions`, rising, as have at most `budget` bytes of point state before
    encoding; those go that are least missed, and the last one never."""
    kept = list(positions)
    while len(kept) > 1 and len(kept) * each_nbytes > budget:
        del kept[least_missed(kept)]
    return tuple(kept)


def _unbroken(runs: Sequence[Rows], stop: int) -> int:
    """The first token from which on `runs` have all rows up to `stop`; `stop` if there are none."""
    first = stop
    for run in reversed(runs):
        if run.start < first <= run.stop:
            first = run.start
    return first
