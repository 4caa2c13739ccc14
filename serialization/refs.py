"""What a manifest says of the blobs it names: chunks, checkpoints and logits, as frozen values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from engine.errors import Corrupt, UnknownFeature
from engine.state import Layout, PartKind
from serialization.blobs import BlobClass, BlobId, blob_class, parse_blob_id
from serialization.limits import MAX_BLOB_NBYTES, MAX_RAW_NBYTES, MAX_TOKENS
from serialization.records import exactly, integer, items, text

#: kinds of rows that chunks hold, in the order of a chunk's blobs
ROW_KINDS = (PartKind.TOKEN, PartKind.BLOCK, PartKind.WINDOW)


@dataclass(frozen=True, slots=True)
class BlobRef:
    """A blob: `nbytes` as stored, `raw_nbytes` of the rows before encoding."""

    blob: BlobId
    raw_nbytes: int
    nbytes: int

    def record(self) -> list[object]:
        return [self.blob, self.raw_nbytes, self.nbytes]

    @classmethod
    def read(cls, value: Any, wanted: BlobClass, what: str) -> BlobRef:
        name, raw_nbytes, nbytes = exactly(value, 3, what)
        blob = read_blob_id(name, wanted, what)
        return cls(blob, integer(raw_nbytes, MAX_RAW_NBYTES, what), integer(nbytes, MAX_BLOB_NBYTES, what))


def read_blob_id(value: Any, wanted: BlobClass, what: str) -> BlobId:
    blob = parse_blob_id(text(value, 128, what))
    if blob_class(blob) is not wanted:
        raise Corrupt(f"{what}: a blob of class {blob_class(blob)} where {wanted} belongs")
    return blob


@dataclass(frozen=True, slots=True)
class ChunkBlob:
    """The rows of one kind of a chunk. `start` is the first token whose rows are inside: later than the
    chunk's own only for window rows."""

    kind: PartKind
    start: int
    ref: BlobRef


@dataclass(frozen=True, slots=True)
class ChunkRef:
    """Tokens [start, stop) and at most one blob for each kind of row. How many tokens a chunk can have,
    `chunk_tokens`, is its manifest's to say.

    It begins at a multiple of that and has so many tokens, but for the last such run: there it may be
    short, and be followed by pieces that go on with what later turns added.
    """

    start: int
    stop: int
    blobs: tuple[ChunkBlob, ...]

    def is_piece(self, chunk_tokens: int) -> bool:
        """Whether it goes on with a chunk that was short."""
        return self.start % chunk_tokens != 0

    def blob(self, kind: PartKind) -> ChunkBlob | None:
        for blob in self.blobs:
            if blob.kind is kind:
                return blob
        return None

    def record(self) -> list[object]:
        blobs = [
            [each.kind.value, each.ref.blob, each.start, each.ref.raw_nbytes, each.ref.nbytes]
            for each in self.blobs
        ]
        return [self.start, self.stop, blobs]

    @classmethod
    def read(cls, value: Any, chunk_tokens: int) -> ChunkRef:
        start, stop, blobs = exactly(value, 3, "chunk")
        start, stop = integer(start, MAX_TOKENS, "chunk"), integer(stop, MAX_TOKENS, "chunk")
        chunk = cls(start, stop, tuple(_read_blob(blob) for blob in items(blobs, len(ROW_KINDS), "chunk")))
        chunk.check(chunk_tokens)
        return chunk

    def check(self, chunk_tokens: int) -> None:
        """Raises Corrupt unless inside of an aligned run, not empty, and its blobs in order and inside."""
        if not self.start < self.stop <= chunk_floor(self.start, chunk_tokens) + chunk_tokens:
            raise Corrupt("chunk: not inside of an aligned run of tokens")
        if [blob.kind for blob in self.blobs] != [kind for kind in ROW_KINDS if self.blob(kind)]:
            raise Corrupt("chunk: its blobs are out of order")
        for blob in self.blobs:
            if blob.kind is PartKind.WINDOW:
                if not self.start <= blob.start < self.stop:
                    raise Corrupt("chunk: window rows outside of it")
            elif blob.start != self.start:
                raise Corrupt("chunk: rows that begin elsewhere")


def _read_blob(value: Any) -> ChunkBlob:
    kind, name, start, raw_nbytes, nbytes = exactly(value, 5, "blob of a chunk")
    kinds = {each.value: each for each in ROW_KINDS}
    if text(kind, 64, "blob of a chunk") not in kinds:
        raise UnknownFeature(f"chunk: rows of an unknown kind: {kind!r}")
    ref = BlobRef.read([name, raw_nbytes, nbytes], BlobClass.ROWS, "blob of a chunk")
    return ChunkBlob(kinds[kind], integer(start, MAX_TOKENS, "blob of a chunk"), ref)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A position that can be resumed, with its point state where the layout has any."""

    position: int
    ref: BlobRef | None

    def record(self) -> list[object]:
        return [self.position, None if self.ref is None else self.ref.record()]

    @classmethod
    def read(cls, value: Any) -> Checkpoint:
        position, ref = exactly(value, 2, "checkpoint")
        return cls(
            integer(position, MAX_TOKENS, "checkpoint"),
            None if ref is None else BlobRef.read(ref, BlobClass.POINT, "checkpoint"),
        )


class Stored(Protocol):
    """Rows and point state of the first `length` tokens, by reference: a manifest's own, or its draft's."""

    @property
    def layout(self) -> Layout: ...

    @property
    def length(self) -> int: ...

    @property
    def chunk_tokens(self) -> int: ...

    @property
    def chunks(self) -> tuple[ChunkRef, ...]: ...

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]: ...


@dataclass(frozen=True, slots=True)
class StoredLogits:
    """The edge of a state whose next token was not sampled yet: where its logits are."""

    ref: BlobRef


def chunk_floor(position: int, chunk_tokens: int) -> int:
    """The start of the aligned run that token `position` is in."""
    return position // chunk_tokens * chunk_tokens


def check_chunks(chunks: tuple[ChunkRef, ...], length: int, chunk_tokens: int) -> None:
    """Raises Corrupt unless `chunks` are in order and cover the tokens [0, length), and are whole before the
    last aligned run.

    The last one may hold rows of more tokens: a rewind or a fork inside a chunk writes no rows.
    """
    at = 0
    last = chunk_floor(chunks[-1].start, chunk_tokens) if chunks else 0
    for chunk in chunks:
        if chunk.start != at or chunk.start >= length:
            raise Corrupt("chunks: a gap, an overlap, or one beyond the tokens")
        if chunk.start < last and chunk.stop - chunk.start != chunk_tokens:
            raise Corrupt("chunks: a short one before the last run of tokens")
        at = chunk.stop
    if at < length:
        raise Corrupt(f"chunks: they cover {at} tokens of {length}")


def check_checkpoints(checkpoints: tuple[Checkpoint, ...], length: int, has_points: bool) -> None:
    """Raises Corrupt unless positions rise up to `length` and each has the point state it needs."""
    before = None
    for checkpoint in checkpoints:
        if checkpoint.position > length or (before is not None and checkpoint.position <= before):
            raise Corrupt("checkpoints: their positions are out of order")
        if (checkpoint.ref is not None) != has_points:
            raise Corrupt("checkpoint: point state that is missing, or that no part has")
        before = checkpoint.position


def blob_refs(
    chunks: tuple[ChunkRef, ...], checkpoints: tuple[Checkpoint, ...], edge: object
) -> Iterator[BlobRef]:
    """Every blob named, in the order of the archive; one may come twice."""
    for chunk in chunks:
        for blob in chunk.blobs:
            yield blob.ref
    for checkpoint in checkpoints:
        if checkpoint.ref is not None:
            yield checkpoint.ref
    if isinstance(edge, StoredLogits):
        yield edge.ref
