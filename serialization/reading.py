"""Rows and point state of one memory, a target's or a drafter's, out of a store, every size checked."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.errors import Corrupt
from engine.state import Layout, PartKind, Point, Rows, parts_of
from serialization.blobs import Bytes, Store, short
from serialization.buffers import NEW, Buffers
from serialization.chunks import Unpacked, row_parts, rows_nbytes, unpack_frame
from serialization.points import decode_point, point_nbytes
from serialization.refs import ROW_KINDS, BlobRef, ChunkBlob, ChunkRef, Stored
from serialization.resume import window_floor, window_runs


@dataclass(frozen=True, slots=True)
class Wanted:
    """Rows [start, stop) of one kind, out of one chunk; `blob` is None where they are no rows at all."""

    kind: PartKind
    chunk: ChunkRef
    blob: ChunkBlob | None
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Reader:
    """Fetches and checks the blobs of what is stored, cut to `length` tokens."""

    store: Store
    stored: Stored
    length: int

    def wanted(self) -> list[Wanted]:
        """What rows there are to read, by kind and in order; sizes that are declared are checked here."""
        wanted = []
        for kind in ROW_KINDS:
            if not (specs := parts_of(self.stored.layout, kind)):
                continue
            first = self._first_window_row() if kind is PartKind.WINDOW else 0
            for chunk in self.stored.chunks:
                start, stop = max(first, chunk.start), min(chunk.stop, self.length)
                if start < stop:
                    blob = chunk.blob(kind) if rows_nbytes(specs, start, stop) else None
                    if blob is not None:
                        check_size(blob, chunk, specs)
                    wanted.append(Wanted(kind, chunk, blob, start, stop))
        return wanted

    def rows(self, wanted: Wanted) -> Rows:
        """In memory of their own."""
        return self.decoded(wanted, self.unpacked(wanted))

    def unpacked(self, wanted: Wanted, buffers: Buffers = NEW) -> Unpacked | None:
        """The blob of these rows, read, checked and unpacked in memory of `buffers`; None where they are no
        rows at all. Raises BlobMissing, Corrupt and other StateErrors, StoreUnavailable."""
        if wanted.blob is None:
            return None
        data = get(self.store, wanted.blob.ref, buffers)
        start, stop = wanted.blob.start, wanted.chunk.stop
        parts = row_parts(parts_of(self.stored.layout, wanted.kind), start, stop)
        return unpack_frame(data, wanted.kind.value, start, stop, parts, buffers)

    def decoded(self, wanted: Wanted, unpacked: Unpacked | None, buffers: Buffers = NEW) -> Rows:
        """The rows of what was unpacked, in memory of `buffers`."""
        specs = parts_of(self.stored.layout, wanted.kind)
        start, stop = wanted.start, wanted.stop
        if unpacked is None:
            none = tuple(torch.empty((0, spec.row_nbytes), dtype=torch.uint8) for spec in specs)
            return Rows(wanted.kind, start, stop, none)
        frame = unpacked.frame(buffers)
        if (start, stop) == (frame.start, frame.stop):
            return Rows(wanted.kind, start, stop, frame.tensors)
        parts = (
            part[spec.num_rows(frame.start, start) : spec.num_rows(frame.start, stop)]
            for spec, part in zip(specs, frame.tensors, strict=True)
        )
        return Rows(wanted.kind, start, stop, tuple(parts))

    def points(self, count: int) -> tuple[Point, ...]:
        """The last `count` checkpoints up to `length`, of which one is there, where the layout has any."""
        specs = parts_of(self.stored.layout, PartKind.POINT)
        upto = [point for point in self.stored.checkpoints if point.position <= self.length]
        return tuple(
            self._point(specs, checkpoint.ref, checkpoint.position)
            for checkpoint in upto[-count:]
            if specs and checkpoint.ref is not None
        )

    def _point(self, specs: Layout, ref: BlobRef, position: int) -> Point:
        if ref.raw_nbytes != point_nbytes(specs):
            raise Corrupt("manifest: point state is not as large as its parts")
        return decode_point(get(self.store, ref), specs, position)

    def _first_window_row(self) -> int:
        """Of the run of window rows that reaches `length`, the first token that is wanted."""
        floor = window_floor(self.stored, self.length)
        runs = window_runs(self.stored.chunks)
        starts = [start for start, stop in runs if start < self.length <= stop]
        return max(floor, *starts) if starts else self.length


def get(store: Store, ref: BlobRef, buffers: Buffers = NEW) -> Bytes:
    """The blob's bytes. Raises Corrupt unless they are as many as the manifest says, BlobMissing."""
    data = store.get(ref.blob, buffers)
    if len(data) != ref.nbytes:
        raise Corrupt(f"blob {short(ref.blob)}: not as large as its manifest says")
    return data


def check_size(blob: ChunkBlob, chunk: ChunkRef, specs: Layout) -> None:
    """Raises Corrupt unless a chunk's blob of these specs is declared as large as its rows are."""
    if blob.ref.raw_nbytes != rows_nbytes(specs, blob.start, chunk.stop):
        raise Corrupt(f"manifest: blob {short(blob.ref.blob)} is not as large as its rows")
