"""States to blobs and back, through a store: what a save writes and a resume reads.

A save puts the blobs that `write_state` makes, then the caller's manifest, then swaps the ref.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.errors import BlobMissing, Corrupt
from engine.state import (
    Edge,
    Layout,
    NextLogits,
    PartKind,
    Pending,
    Point,
    Rows,
    SequenceState,
    least_missed,
    parts_of,
)
from serialization.blobs import BlobClass, BlobId, Store, short
from serialization.chunks import CHUNK_TOKENS, decode_rows, encode_rows, rows_nbytes
from serialization.manifest import Manifest, StoredEdge
from serialization.parallel import in_order
from serialization.pipelines import DEFAULT, CodecSet
from serialization.points import (
    decode_logits,
    decode_point,
    encode_logits,
    encode_point,
    point_nbytes,
)
from serialization.refs import ROW_KINDS, BlobRef, Checkpoint, ChunkBlob, ChunkRef, StoredLogits
from serialization.resume import (
    kept_chunks,
    require_resumable,
    spans_within,
    window_floor,
    window_runs,
)

#: Bytes of point state that a manifest names at most, before encoding.
POINT_BUDGET = 2**28


@dataclass(frozen=True, slots=True)
class WrittenState:
    """Where a state's rows, point state and edge are stored now: fields for the manifest.

    `num_blobs` and `nbytes` count what was put by this save, as stored.
    """

    chunks: tuple[ChunkRef, ...]
    checkpoints: tuple[Checkpoint, ...]
    edge: StoredEdge
    num_blobs: int
    nbytes: int


def write_state(
    store: Store,
    state: SequenceState,
    previous: Manifest | None,
    untouched: int,
    codecs: CodecSet = DEFAULT,
    workers: int = 1,
    point_budget: int = POINT_BUDGET,
) -> WrittenState:
    """Put what `previous` has not stored yet of `state`, and say where everything is.

    Rows of the first `untouched` tokens are known to be those that `previous` stored (see
    `resume.kept_chunks`). `state` has token and block rows from `resume.first_new(...)` on at least; its
    tokens and spans are complete. Of its checkpoints those are named that fit into `point_budget` bytes of
    point state. With `workers` above 1 blobs are encoded and put by as many threads.

    Raises FingerprintMismatch if `previous` is of another layout or model, Corrupt if the state lacks rows,
    LimitExceeded, StoreFull, StoreUnavailable; what was put by then is unreferenced.
    """
    if previous is not None:
        previous.refuse_other(state.fingerprint, state.layout)
    writer = _Writer(store, state, codecs)
    kept = kept_chunks(previous, state.tokens, state.spans, untouched)
    start = kept[-1].stop if kept else 0
    new = in_order(writer.chunk, range(start, state.length, CHUNK_TOKENS), workers)
    known = _kept_checkpoints(previous, state, untouched)
    positions = {checkpoint.position for checkpoint in known}
    fresh = [point for point in state.points if point.position not in positions]
    each_nbytes = point_nbytes(parts_of(state.layout, PartKind.POINT))
    named = thinned(sorted([*positions, *(point.position for point in fresh)]), each_nbytes, point_budget)
    points = in_order(writer.checkpoint, [point for point in fresh if point.position in named], workers)
    edge, logits = writer.edge(state.edge)
    put = [blob.ref for chunk in new for blob in chunk.blobs]
    put += [point.ref for point in points if point.ref is not None] + logits
    return WrittenState(
        chunks=(*kept, *new),
        checkpoints=tuple(each for each in _merged(known, points) if each.position in named),
        edge=edge,
        num_blobs=len(put),
        nbytes=sum(ref.nbytes for ref in put),
    )


@dataclass(frozen=True, slots=True)
class _Writer:
    """Makes and puts the blobs of one state."""

    store: Store
    state: SequenceState
    codecs: CodecSet

    def put(self, cls: BlobClass, raw_nbytes: int, data: bytes) -> BlobRef:
        return BlobRef(self.store.put(cls, data), raw_nbytes, len(data))

    def chunk(self, start: int) -> ChunkRef:
        """The chunk from `start` on, its blobs put."""
        stop = min(start + CHUNK_TOKENS, self.state.length)
        blobs = (self.rows(kind, start, stop) for kind in ROW_KINDS)
        return ChunkRef(start, stop, tuple(blob for blob in blobs if blob is not None))

    def rows(self, kind: PartKind, start: int, stop: int) -> ChunkBlob | None:
        """The rows of one kind for tokens [start, stop): None where there are none.

        Window rows may begin later: as far back as the state has all of them up to the end of the chunk.
        """
        specs = parts_of(self.state.layout, kind)
        runs = self.state.rows_of(kind)
        if kind is PartKind.WINDOW:
            start = max(start, _unbroken(runs, stop))
        if start >= stop or not rows_nbytes(specs, start, stop):
            return None
        data = encode_rows(kind, specs, start, stop, runs, self.codecs)
        return ChunkBlob(kind, start, self.put(BlobClass.ROWS, rows_nbytes(specs, start, stop), data))

    def checkpoint(self, point: Point) -> Checkpoint:
        specs = parts_of(self.state.layout, PartKind.POINT)
        if not specs:
            return Checkpoint(point.position, None)
        data = encode_point(specs, point, self.codecs)
        return Checkpoint(point.position, self.put(BlobClass.POINT, point_nbytes(specs), data))

    def edge(self, edge: Edge) -> tuple[StoredEdge, list[BlobRef]]:
        if not isinstance(edge, NextLogits):
            return edge, []
        data = encode_logits(edge.logits, self.state.length, self.codecs)
        ref = self.put(BlobClass.POINT, 4 * edge.logits.numel(), data)
        return StoredLogits(ref), [ref]


def _unbroken(runs: Sequence[Rows], stop: int) -> int:
    """The first token from which on `runs` have all rows up to `stop`; `stop` if there are none."""
    first = stop
    for run in reversed(runs):
        if run.start < first <= run.stop:
            first = run.start
    return first


def _kept_checkpoints(
    previous: Manifest | None, state: SequenceState, untouched: int
) -> tuple[Checkpoint, ...]:
    """Those of `previous` up to `untouched`, as far as the tokens before them are the same."""
    if previous is None:
        return ()
    return tuple(
        checkpoint
        for checkpoint in previous.checkpoints
        if checkpoint.position <= min(untouched, state.length)
        and previous.tokens[: checkpoint.position] == state.tokens[: checkpoint.position]
    )


def thinned(positions: Sequence[int], each_nbytes: int, budget: int) -> tuple[int, ...]:
    """As many of the checkpoints at `positions`, rising, as have at most `budget` bytes of point state before
    encoding; those go that are least missed, and the last one never."""
    kept = list(positions)
    while len(kept) > 1 and len(kept) * each_nbytes > budget:
        del kept[least_missed(kept)]
    return tuple(kept)


def _merged(kept: Sequence[Checkpoint], new: Sequence[Checkpoint]) -> tuple[Checkpoint, ...]:
    """Both, by position."""
    by_position = {checkpoint.position: checkpoint for checkpoint in (*kept, *new)}
    return tuple(by_position[position] for position in sorted(by_position))


def read_state(
    store: Store, manifest: Manifest, length: int | None = None, workers: int = 2, num_points: int = 1
) -> SequenceState:
    """The state of a manifest, or of its first `length` tokens, every size and digest checked.

    It has one run of each kind for every chunk: views of the decoded chunk, cut at `length`. Window rows
    begin where a resume needs them, or where the last partial chunk does. A state that was cut has the token
    that followed as its pending edge. The caller compares fingerprints before (`Manifest.refuse_other`).

    Blobs are fetched and decoded by `workers` threads, each of which calls `store.get`. Of the checkpoints up
    to `length` the last `num_points` are read.

    Raises NoCheckpoint where the state could not go on, BlobMissing, Corrupt and other StateErrors,
    StoreUnavailable. Nothing is returned unless everything was right.
    """
    length = manifest.length if length is None else length
    require_resumable(manifest, length)
    reader = _Reader(store, manifest, length)
    rows = in_order(reader.rows, reader.wanted(), workers)
    whole = length == manifest.length
    return SequenceState(
        layout=manifest.layout,
        fingerprint=manifest.fingerprint,
        tokens=manifest.tokens[:length],
        rows=tuple(rows),
        points=reader.points(num_points),
        spans=spans_within(manifest.spans, 0, length),
        edge=reader.edge(),
        sampler=manifest.sampler,
        canary=manifest.canary if whole else None,
    )


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Rows [start, stop) of one kind, out of one chunk; `blob` is None where they are no rows at all."""

    kind: PartKind
    chunk: ChunkRef
    blob: ChunkBlob | None
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Reader:
    """Fetches and checks the blobs of one manifest, cut to `length` tokens."""

    store: Store
    manifest: Manifest
    length: int

    def wanted(self) -> list[_Wanted]:
        """What there is to read, by kind and in order; sizes in the manifest are checked here."""
        wanted = []
        for kind in ROW_KINDS:
            if not (specs := parts_of(self.manifest.layout, kind)):
                continue
            first = self.first_window_row() if kind is PartKind.WINDOW else 0
            for chunk in self.manifest.chunks:
                start, stop = max(first, chunk.start), min(chunk.stop, self.length)
                if start < stop:
                    blob = chunk.blob(kind) if rows_nbytes(specs, start, stop) else None
                    if blob is not None:
                        self.check(blob, chunk, specs)
                    wanted.append(_Wanted(kind, chunk, blob, start, stop))
        return wanted

    def first_window_row(self) -> int:
        """Of the run of window rows that reaches `length`, the first token that is wanted."""
        floor = window_floor(self.manifest, self.length)
        starts = [start for start, stop in window_runs(self.manifest) if start < self.length <= stop]
        return max(floor, *starts) if starts else self.length

    def check(self, blob: ChunkBlob, chunk: ChunkRef, specs: Layout) -> None:
        if blob.ref.raw_nbytes != rows_nbytes(specs, blob.start, chunk.stop):
            raise Corrupt(f"manifest: blob {short(blob.ref.blob)} is not as large as its rows")

    def get(self, ref: BlobRef) -> bytes:
        data = self.store.get(ref.blob)
        if len(data) != ref.nbytes:
            raise Corrupt(f"blob {short(ref.blob)}: not as large as its manifest says")
        return data

    def rows(self, wanted: _Wanted) -> Rows:
        specs = parts_of(self.manifest.layout, wanted.kind)
        start, stop = wanted.start, wanted.stop
        if wanted.blob is None:
            none = tuple(torch.empty((0, spec.row_nbytes), dtype=torch.uint8) for spec in specs)
            return Rows(wanted.kind, start, stop, none)
        data = self.get(wanted.blob.ref)
        whole = decode_rows(data, wanted.kind, specs, wanted.blob.start, wanted.chunk.stop)
        parts = (
            part[spec.num_rows(whole.start, start) : spec.num_rows(whole.start, stop)]
            for spec, part in zip(specs, whole.parts, strict=True)
        )
        return Rows(wanted.kind, start, stop, tuple(parts))

    def points(self, count: int) -> tuple[Point, ...]:
        """The last `count` checkpoints up to `length`, of which one is there, where the layout has any."""
        specs = parts_of(self.manifest.layout, PartKind.POINT)
        upto = [point for point in self.manifest.checkpoints if point.position <= self.length]
        return tuple(
            self.point(specs, checkpoint.ref, checkpoint.position)
            for checkpoint in upto[-count:]
            if specs and checkpoint.ref is not None
        )

    def point(self, specs: Layout, ref: BlobRef, position: int) -> Point:
        if ref.raw_nbytes != point_nbytes(specs):
            raise Corrupt("manifest: point state is not as large as its parts")
        return decode_point(self.get(ref), specs, position)

    def edge(self) -> Edge:
        if self.length < self.manifest.length:
            return Pending(self.manifest.tokens[self.length]) if self.length else None
        match self.manifest.edge:
            case StoredLogits(ref):
                num_logits, rest = divmod(ref.raw_nbytes, 4)
                if rest or not num_logits:
                    raise Corrupt("manifest: logits that are not whole numbers")
                return NextLogits(decode_logits(self.get(ref), self.length, num_logits))
            case edge:
                return edge


def missing_blobs(store: Store, manifest: Manifest) -> tuple[BlobId, ...]:
    """Blobs that `manifest` names and the store has not: what a save older than the grace asks before it
    swaps."""
    blobs = [ref.blob for ref in manifest.blobs()]
    return tuple(blob for blob, there in zip(blobs, store.has(blobs), strict=True) if not there)


def verify_kept(store: Store, manifest: Manifest) -> None:
    """Raises BlobMissing if a blob that `manifest` names is gone."""
    if missing := missing_blobs(store, manifest):
        raise BlobMissing(f"{len(missing)} stored blobs are gone, {short(missing[0])} first", blobs=missing)
