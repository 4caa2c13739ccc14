"""The header of a frame: what a blob says of itself (docs/format.md, section 4.1)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from engine.errors import Corrupt, UnknownFeature
from engine.state import DTYPES, PartKind
from serialization.blobs import Bytes
from serialization.canonical import pack, unpack
from serialization.codecs import codec_named
from serialization.limits import (
    MAX_AXES,
    MAX_BLOB_NBYTES,
    MAX_CODECS,
    MAX_PARTS,
    MAX_RAW_NBYTES,
    MAX_ROW_NBYTES,
    MAX_STREAMS,
    MAX_TOKENS,
    MAX_WINDOW,
    refuse_above,
)
from serialization.pipelines import Pipeline
from serialization.records import Record, exactly, integer, items, text


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
class Section:
    """All parts of one dtype, as stored: their pipeline, and the sizes of its streams in the payload."""

    dtype: str
    pipeline: Pipeline
    stream_nbytes: tuple[int, ...]

    def record(self) -> list[object]:
        codecs = [[codec.name, codec.config] for codec in self.pipeline]
        return [self.dtype, codecs, list(self.stream_nbytes)]


@dataclass(frozen=True, slots=True)
class Header:
    """What the header of a frame says, all of it checked against itself and the size of the blob."""

    kind: str
    start: int
    stop: int
    parts: Parts
    raw_nbytes: int
    sections: tuple[Section, ...]

    def encode(self) -> bytes:
        return pack(
            {
                "kind": self.kind,
                "parts": _parts_record(self.parts),
                "raw_nbytes": self.raw_nbytes,
                "sections": [section.record() for section in self.sections],
                "start": self.start,
                "stop": self.stop,
            }
        )

    @staticmethod
    def decode(data: Bytes) -> Header:
        """Raises Corrupt, UnknownFeature (a kind, dtype or codec) or LimitExceeded."""
        return _read_header(Record.of(unpack(data, "header of a blob"), "header of a blob"))


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
    if [section.dtype for section in sections] != list(by_dtype(parts)):
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


def by_dtype(parts: Parts) -> dict[str, list[int]]:
    """Indices of the parts of each dtype, by first appearance."""
    sections: dict[str, list[int]] = {}
    for index, part in enumerate(parts):
        sections.setdefault(part.dtype, []).append(index)
    return sections
