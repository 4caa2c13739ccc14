"""Frames: the bytes of one blob, which hold rows of every part of one kind (docs/format.md, section 4).

A chunk is the rows of 256 aligned tokens, or of as many as its manifest says (the last one of a session
perhaps fewer), one frame for each kind. Point state and logits are in frames of the same form (`points.py`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from engine.errors import ConfigError, Corrupt
from engine.state import Layout, PartKind, PartSpec, Rows
from serialization import pipelines
from serialization.blobs import Bytes
from serialization.buffers import NEW, Buffers, Stream
from serialization.headers import Header, Part, Parts, Section, by_dtype
from serialization.limits import MAX_BLOB_NBYTES, MAX_HEADER_NBYTES, MAX_RAW_NBYTES, refuse_above
from serialization.pipelines import CodecSet
from serialization.prefix import PREFIX_NBYTES, Letter, check_prefix, prefix
from serialization.streams import Grid, Streams

#: Tokens of a chunk where a manifest says nothing else.
CHUNK_TOKENS = 256
#: What a manifest may say.
CHUNK_SIZES = tuple(2**power for power in range(6, 13))

_HEADER_SIZE = struct.Struct("<I")
_BODY = PREFIX_NBYTES + _HEADER_SIZE.size


def check_chunk_tokens(chunk_tokens: int) -> None:
    """Raises ConfigError unless chunks can have so many tokens."""
    if chunk_tokens not in CHUNK_SIZES:
        raise ConfigError(f"chunks of {chunk_tokens} tokens: there are {', '.join(map(str, CHUNK_SIZES))}")


@dataclass(frozen=True, slots=True)
class Frame:
    """One blob, read: `tensors[i]` is uint8 [num_rows, row_nbytes] of the i-th part, a view of one buffer."""

    kind: str
    start: int
    stop: int
    parts: Parts
    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Unpacked:
    """One blob, checked, whose packed streams are unpacked: the half of reading that is done ahead."""

    _header: Header
    _sections: tuple[tuple[pipelines.Pipeline, Streams, Grid], ...]

    def frame(self, buffers: Buffers = NEW) -> Frame:
        """What it holds, in memory of `buffers`; never views of what was unpacked. Raises Corrupt."""
        parts = self._header.parts
        tensors: dict[int, torch.Tensor] = {}
        for (left, streams, grid), indices in zip(self._sections, by_dtype(parts).values(), strict=True):
            decoded = pipelines.decode(streams, left, grid, buffers)
            if not decoded.flags.writeable or any(np.may_share_memory(decoded, one) for one in streams):
                decoded = _copied(decoded, buffers)
            views = _views(torch.from_numpy(decoded), [parts[index] for index in indices])
            tensors.update(zip(indices, views, strict=True))
        ordered = tuple(tensors[index] for index in range(len(parts)))
        return Frame(self._header.kind, self._header.start, self._header.stop, parts, ordered)


def row_parts(specs: Layout, start: int, stop: int) -> Parts:
    """What a frame of these specs' rows for tokens [start, stop) says of them."""
    return tuple(Part(spec.dtype, spec.shape, spec.block, spec.num_rows(start, stop)) for spec in specs)


def rows_nbytes(specs: Layout, start: int, stop: int) -> int:
    """Bytes of these specs' rows for tokens [start, stop), before encoding."""
    return sum(spec.num_rows(start, stop) * spec.row_nbytes for spec in specs)


def encode_rows(
    kind: PartKind, specs: Layout, start: int, stop: int, runs: Sequence[Rows], codecs: CodecSet
) -> bytes:
    """The blob of the rows of tokens [start, stop), cut out of consecutive `runs` that cover them.

    Raises LimitExceeded when it would be larger than a blob may be, Corrupt if the runs have other rows.
    """
    pieces = tuple(_pieces(spec, index, start, stop, runs) for index, spec in enumerate(specs))
    return encode_frame(kind.value, start, stop, row_parts(specs, start, stop), pieces, codecs)


def _pieces(
    spec: PartSpec, index: int, start: int, stop: int, runs: Sequence[Rows]
) -> tuple[torch.Tensor, ...]:
    """The rows of one part for tokens [start, stop): slices of the runs, in order."""
    pieces = []
    for run in runs:
        low, high = max(start, run.start), min(stop, run.stop)
        if low < high:
            pieces.append(run.parts[index][spec.num_rows(run.start, low) : spec.num_rows(run.start, high)])
    return tuple(pieces)


def decode_rows(data: Bytes, kind: PartKind, specs: Layout, start: int, stop: int) -> Rows:
    """The rows of a blob that must hold tokens [start, stop) of these specs. Digests are checked before.

    Raises Corrupt when the blob holds something else, and StateErrors as `decode_frame`.
    """
    frame = decode_frame(data, kind.value, start, stop, row_parts(specs, start, stop))
    return Rows(kind, start, stop, frame.tensors)


def encode_frame(
    kind: str,
    start: int,
    stop: int,
    parts: Parts,
    pieces: Sequence[Sequence[torch.Tensor]],
    codecs: CodecSet,
) -> bytes:
    """The bytes of a blob. `pieces[i]`: uint8 tensors whose bytes, joined, are the rows of `parts[i]`."""
    raw_nbytes = sum(part.nbytes for part in parts)
    refuse_above("rows of one blob, in bytes", raw_nbytes, MAX_RAW_NBYTES)
    sections: list[Section] = []
    payload: list[Stream] = []
    for dtype, indices in by_dtype(parts).items():
        grid = _grid(dtype, [parts[index] for index in indices])
        section = _joined(grid.nbytes, [piece for index in indices for piece in pieces[index]])
        pipeline, streams = pipelines.encode(section, codecs.pipeline(dtype), grid)
        sections.append(Section(dtype, pipeline, tuple(len(stream) for stream in streams)))
        payload += streams
    header = Header(kind, start, stop, parts, raw_nbytes, tuple(sections)).encode()
    refuse_above("header of a blob, in bytes", len(header), MAX_HEADER_NBYTES)
    head = prefix(Letter.BLOB) + _HEADER_SIZE.pack(len(header)) + header
    refuse_above("blob, in bytes", len(head) + sum(map(len, payload)), MAX_BLOB_NBYTES)
    return b"".join([head, *(stream.data for stream in payload)])


def decode_frame(data: Bytes, kind: str, start: int, stop: int, parts: Parts) -> Frame:
    """The rows of a blob that must hold just this, in memory of their own. Raises as `unpack_frame`."""
    return unpack_frame(data, kind, start, stop, parts).frame()


def unpack_frame(
    data: Bytes, kind: str, start: int, stop: int, parts: Parts, buffers: Buffers = NEW
) -> Unpacked:
    """A blob that must hold just this, checked. Digests are checked before.

    Its streams are in memory of `buffers`, or views of `data`.

    Nothing is allocated before every size in the header agrees with `parts` and with the bytes there are.
    Raises Corrupt, UnknownVersion, UnknownFeature (a codec), LimitExceeded.
    """
    header, payload = _header(data)
    if (header.kind, header.start, header.stop) != (kind, start, stop):
        raise Corrupt(
            f"a blob of {header.kind} [{header.start}, {header.stop}) where {kind} [{start}, {stop}) belongs"
        )
    if header.parts != parts:
        raise Corrupt("a blob whose parts are not those of the layout")
    at, sections = 0, []
    for section, indices in zip(header.sections, by_dtype(parts).values(), strict=True):
        streams = []
        for nbytes in section.stream_nbytes:
            streams.append(np.frombuffer(payload[at : at + nbytes], np.uint8))
            at += nbytes
        grid = _grid(section.dtype, [parts[index] for index in indices])
        left, streams = pipelines.unpack(streams, section.pipeline, grid, buffers)
        sections.append((left, streams, grid))
    return Unpacked(header, tuple(sections))


def read_header(data: Bytes) -> Header:
    """What a blob says of itself, without decoding it. Raises as `decode_frame`."""
    return _header(data)[0]


def _header(data: Bytes) -> tuple[Header, memoryview]:
    refuse_above("blob, in bytes", len(data), MAX_BLOB_NBYTES)
    check_prefix(Letter.BLOB, data, "blob")
    view = memoryview(data)
    if len(view) < _BODY:
        raise Corrupt("blob: cut off")
    (header_nbytes,) = _HEADER_SIZE.unpack_from(view, PREFIX_NBYTES)
    refuse_above("header of a blob, in bytes", header_nbytes, MAX_HEADER_NBYTES)
    packed = view[_BODY : _BODY + header_nbytes]
    if len(packed) != header_nbytes:
        raise Corrupt("blob: cut off")
    payload = view[_BODY + header_nbytes :]
    header = Header.decode(packed)
    if sum(nbytes for section in header.sections for nbytes in section.stream_nbytes) != len(payload):
        raise Corrupt("blob: its payload is not as long as its header says")
    return header, payload


def _grid(dtype: str, parts: Sequence[Part]) -> Grid:
    runs = groupby((part.num_rows, part.num_values) for part in parts)
    return Grid(dtype, tuple((len(list(same)), rows, channels) for (rows, channels), same in runs))


def _joined(nbytes: int, pieces: Sequence[torch.Tensor]) -> Stream:
    """The bytes of all pieces, one after another, in a new buffer of just this size."""
    if sum(piece.numel() for piece in pieces) != nbytes:
        raise Corrupt("rows to be stored do not cover the tokens that they are for")
    joined = np.empty(nbytes, np.uint8)
    at = 0
    for piece in pieces:
        joined[at : at + piece.numel()] = piece.reshape(-1).numpy(force=True)
        at += piece.numel()
    return joined


def _views(section: torch.Tensor, parts: Sequence[Part]) -> Iterator[torch.Tensor]:
    """The rows of each part. Equal parts are taken apart at once: most models have many."""
    at = 0
    for part, same in groupby(parts):
        count = len(list(same))
        run = section[at : at + count * part.nbytes].view(count, part.num_rows, part.row_nbytes)
        at += run.numel()
        yield from run.unbind()


def _copied(section: Stream, buffers: Buffers) -> Stream:
    copy = buffers.take(len(section))
    copy[:] = section
    return copy
