"""Frames: the bytes of one blob, which hold rows of every part of one kind (docs/format.md, section 4).

A chunk is the rows of 256 aligned tokens (the last one of a session perhaps fewer), one frame for each
kind. Point state and logits are in frames of the same form (`points.py`).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch

from engine.errors import Corrupt, UnknownFeature
from engine.state import DTYPES, Layout, PartKind, PartSpec, Rows
from serialization import pipelines
from serialization.blobs import Bytes
from serialization.canonical import pack, unpack
from serialization.codecs import Grid, Stream, codec_named
from serialization.limits import (
    MAX_AXES,
    MAX_BLOB_NBYTES,
    MAX_CODECS,
    MAX_HEADER_NBYTES,
    MAX_PARTS,
    MAX_RAW_NBYTES,
    MAX_ROW_NBYTES,
    MAX_STREAMS,
    MAX_TOKENS,
    MAX_WINDOW,
    refuse_above,
)
from serialization.pipelines import CodecSet, Pipeline
from serialization.prefix import PREFIX_NBYTES, Letter, check_prefix, prefix
from serialization.records import Record, exactly, integer, items, text

CHUNK_TOKENS = 256

_HEADER_SIZE = struct.Struct("<I")
_BODY = PREFIX_NBYTES + _HEADER_SIZE.size


def chunk_floor(position: int) -> int:
    """The start of the chunk that token `position` is in."""
    return position // CHUNK_TOKENS * CHUNK_TOKENS


@dataclass(frozen=True, slots=True)
class Part:
    """What a frame says of one part: its rows' dtype and shape, tokens in a row, and number of rows."""

    dtype: str
    shape: tuple[int, ...]
    block: int
    num_rows: int

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @property
    def row_nbytes(self) -> int:
        nbytes, values = DTYPES[self.dtype]
        return self.num_values // values * nbytes

    @property
    def nbytes(self) -> int:
        return self.num_rows * self.row_nbytes


Parts = tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Frame:
    """One blob, read: `tensors[i]` is uint8 [num_rows, row_nbytes] of the i-th part, a view of one buffer."""

    kind: str
    start: int
    stop: int
    parts: Parts
    tensors: tuple[torch.Tensor, ...]


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

    The parts are views of one buffer of the decoded size. Raises Corrupt when the blob holds something
    else, and StateErrors as `decode_frame`.
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
    sections: list[object] = []
    payload: list[Stream] = []
    for dtype, indices in _sections(parts).items():
        grid = _grid(dtype, [parts[index] for index in indices])
        section = _joined(grid.nbytes, [piece for index in indices for piece in pieces[index]])
        pipeline, streams = pipelines.encode(section, codecs.pipeline(dtype), grid)
        recorded = [[codec.name, codec.config] for codec in pipeline]
        sections.append([dtype, recorded, [len(stream) for stream in streams]])
        payload += streams
    header = pack(
        {
            "kind": kind,
            "parts": _parts_record(parts),
            "raw_nbytes": raw_nbytes,
            "sections": sections,
            "start": start,
            "stop": stop,
        }
    )
    refuse_above("header of a blob, in bytes", len(header), MAX_HEADER_NBYTES)
    head = prefix(Letter.BLOB) + _HEADER_SIZE.pack(len(header)) + header
    refuse_above("blob, in bytes", len(head) + sum(map(len, payload)), MAX_BLOB_NBYTES)
    return b"".join([head, *(stream.data for stream in payload)])


def decode_frame(data: Bytes, kind: str, start: int, stop: int, parts: Parts) -> Frame:
    """The rows of a blob that must hold just this. Digests are checked before.

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
    return Frame(kind, start, stop, parts, _decoded(header, payload))


@dataclass(frozen=True, slots=True)
class Section:
    """All parts of one dtype, as stored."""

    dtype: str
    pipeline: Pipeline
    stream_nbytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Header:
    """What the header of a frame says, all of it checked against itself and the size of the blob."""

    kind: str
    start: int
    stop: int
    parts: Parts
    raw_nbytes: int
    sections: tuple[Section, ...]


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
    header = _read_header(Record.of(unpack(packed, "header of a blob"), "header of a blob"))
    if sum(nbytes for section in header.sections for nbytes in section.stream_nbytes) != len(payload):
        raise Corrupt("blob: its payload is not as long as its header says")
    return header, payload


def _read_header(record: Record) -> Header:
    kind = record.text("kind", 16)
    if kind not in _KINDS:
        raise UnknownFeature(f"a blob of an unknown kind: {kind!r}")
    start = record.integer("start", MAX_TOKENS)
    stop = record.integer("stop", MAX_TOKENS)
    if stop < start or (kind in ("point", "logits")) != (start == stop):
        raise Corrupt("header of a blob: its tokens are out of order")
    parts = _read_parts(record.items("parts", MAX_PARTS), kind, start, stop)
    raw_nbytes = record.integer("raw_nbytes", MAX_RAW_NBYTES)
    if raw_nbytes != sum(part.nbytes for part in parts):
        raise Corrupt("header of a blob: its size before encoding is not that of its parts")
    sections = tuple(_read_section(item) for item in record.items("sections", len(DTYPES)))
    record.end()
    if [section.dtype for section in sections] != list(_sections(parts)):
        raise Corrupt("header of a blob: its sections are not those of its parts")
    return Header(kind, start, stop, parts, raw_nbytes, sections)


_KINDS = frozenset({*(kind.value for kind in PartKind), "logits"})


def _parts_record(parts: Parts) -> list[object]:
    runs = groupby((part.dtype, part.shape, part.block) for part in parts)
    return [[len(list(same)), dtype, list(shape), block] for (dtype, shape, block), same in runs]


def _read_parts(record: list[Any], kind: str, start: int, stop: int) -> Parts:
    parts: list[Part] = []
    before = None
    for item in record:
        count, dtype, axes, block = exactly(item, 4, "parts")
        shape = tuple(integer(axis, 2**31, "shape") for axis in items(axes, MAX_AXES, "shape"))
        block = integer(block, MAX_WINDOW, "block")
        dtype = text(dtype, 16, "dtype")
        refuse_above("parts of one blob", len(parts) + integer(count, MAX_PARTS, "parts"), MAX_PARTS)
        if dtype not in DTYPES:
            raise UnknownFeature(f"rows of an unknown dtype: {dtype!r}")
        if not shape or 0 in shape or block < 1 or count < 1 or shape[-1] % DTYPES[dtype][1]:
            raise Corrupt("header of a blob: a part that cannot be")
        if (dtype, shape, block) == before:
            raise Corrupt("header of a blob: equal parts in two runs")
        before = (dtype, shape, block)
        num_rows = 1 if kind in ("point", "logits") else stop // block - start // block
        part = Part(dtype, shape, block, num_rows)
        refuse_above("one row, in bytes", part.row_nbytes, MAX_ROW_NBYTES)
        parts += [part] * count
    return tuple(parts)


def _read_section(item: Any) -> Section:
    dtype, codecs, sizes = exactly(item, 3, "section")
    pipeline = []
    for codec in items(codecs, MAX_CODECS, "pipeline"):
        name, config = exactly(codec, 2, "codec")
        pipeline.append(codec_named(text(name, 64, "codec"), _config(config)))
    nbytes = tuple(integer(size, MAX_BLOB_NBYTES, "stream") for size in items(sizes, MAX_STREAMS, "streams"))
    return Section(text(dtype, 16, "dtype"), tuple(pipeline), nbytes)


def _config(value: Any) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise Corrupt("header of a blob: a codec's config that is no map")
    return value


def _sections(parts: Parts) -> dict[str, list[int]]:
    """Indices of the parts of each dtype, by first appearance."""
    sections: dict[str, list[int]] = {}
    for index, part in enumerate(parts):
        sections.setdefault(part.dtype, []).append(index)
    return sections


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


def _decoded(header: Header, payload: memoryview) -> tuple[torch.Tensor, ...]:
    """The rows of each part, as views of one tensor for each section."""
    tensors: dict[int, torch.Tensor] = {}
    at = 0
    for section, indices in zip(header.sections, _sections(header.parts).values(), strict=True):
        streams = []
        for nbytes in section.stream_nbytes:
            streams.append(np.frombuffer(payload[at : at + nbytes], np.uint8))
            at += nbytes
        members = [header.parts[index] for index in indices]
        decoded = pipelines.decode(streams, section.pipeline, _grid(section.dtype, members))
        # rows that were stored as they are must not keep, or be, the read-only blob
        buffer = torch.from_numpy(decoded if decoded.flags.writeable else decoded.copy())
        views = torch.split(buffer, [part.nbytes for part in members])
        for index, part, view in zip(indices, members, views, strict=True):
            tensors[index] = view.view(part.num_rows, part.row_nbytes)
    return tuple(tensors[index] for index in range(len(header.parts)))
