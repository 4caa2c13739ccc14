"""KV caches of llama.cpp: cells and their rows, of one stream or several.

u32 n_stream                          not in 2a, 2b, 9a
of each stream:
  u32 num_cells                       0: nothing more of this stream
  of each cell: i32 position, u32 num_owners, [i32 extension[2 or 3]], i32 owner[num_owners]
  u32 transposed, u32 num_layers
  of each layer: i32 type, u64 row_nbytes, K [num_cells, row_nbytes]
  of each layer with V, upright:    i32 type, u64 row_nbytes, V [num_cells, row_nbytes]
  of each layer with V, transposed: i32 type, u32 value_nbytes, u32 num_values, V [num_values, num_cells]
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.errors import UnknownFeature
from serialization.foreign.cells import CellForm, Cells, read_cells, write_cells
from serialization.foreign.cursor import Bytes, Cursor
from serialization.foreign.foreign_state import ForeignRows, Tensor
from serialization.foreign.geometry import RowsCache
from serialization.foreign.ggml import BY_NUMBER, GgmlType, type_of

#: llama.cpp's own bound on sequences, and so on streams (LLAMA_MAX_SEQ)
MAX_STREAMS = 256


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """Cells of one stream and their rows: K of every layer, then V of every layer that has any, all upright.
    No rows where there are no cells."""

    cells: Cells
    rows: tuple[ForeignRows, ...] = ()
    transposed: bool = False


def read_kv(cursor: Cursor, cache: RowsCache, form: CellForm) -> tuple[Stream, ...]:
    """Every stream of one cache. Raises `Corrupt`, `LimitExceeded`, or `UnknownFeature` for rows of a type
    that ours cannot have."""
    streams = cursor.count("streams", 4, MAX_STREAMS) if form.streams else 1
    if not streams:
        raise cursor.corrupt("a cache without streams")
    start = cursor.at
    read = tuple(_read_stream(cursor, cache, form) for _ in range(streams))
    if not any(len(stream.cells) for stream in read):
        raise cursor.corrupt("a cache without cells", start)
    return read


def write_kv(streams: tuple[Stream, ...], cache: RowsCache, form: CellForm) -> Iterator[Bytes]:
    """What `read_kv` reads."""
    if form.streams:
        yield struct.pack("<I", len(streams))
    for stream in streams:
        yield from write_cells(stream.cells, form)
        if len(stream.cells):
            yield struct.pack("<II", stream.transposed, len(cache.layers))
            for rows in stream.rows:
                yield from _write_rows(rows, stream.transposed and rows.tensor is Tensor.VALUES)


def read_type(cursor: Cursor, what: str) -> GgmlType:
    at = cursor.at
    number = cursor.i32(f"the type of {what}")
    if number not in BY_NUMBER:
        raise cursor.corrupt(f"{what}: there is no tensor type {number}", at)
    return BY_NUMBER[number]


def convertible(found: GgmlType, what: str) -> str:
    """Its name. Raises `UnknownFeature` for a type that our rows cannot have."""
    if not found.convertible:
        raise UnknownFeature(f"{what} are stored as {found.name}, which is not converted", dtype=found.name)
    return found.name


def read_rows(cursor: Cursor, layer: int, tensor: Tensor, num_rows: int, values: int) -> ForeignRows:
    """i32 type, u64 row_nbytes, and the rows: held against `values` a row."""
    what = f"{tensor} of layer {layer}"
    found = read_type(cursor, what)
    at = cursor.at
    row_nbytes = cursor.u64(f"the bytes of a row of {what}")
    if row_nbytes != found.row_nbytes(values):
        raise cursor.corrupt(
            f"{what}: rows of {row_nbytes} bytes, where the model has {values} values of {found.name}", at
        )
    return ForeignRows(layer, tensor, convertible(found, what), cursor.rows(num_rows, row_nbytes, what))


def write_rows(rows: ForeignRows) -> Iterator[Bytes]:
    """What `read_rows` reads."""
    yield struct.pack("<iQ", type_of(rows.dtype).number, rows.data.shape[1])
    yield flat(rows.data)


def flat(data: torch.Tensor) -> memoryview:
    """The bytes of a tensor, without a copy where it is contiguous."""
    return (
        memoryview(data.contiguous().numpy().reshape(-1).data).cast("B") if data.numel() else memoryview(b"")
    )


def _read_stream(cursor: Cursor, cache: RowsCache, form: CellForm) -> Stream:
    cells = read_cells(cursor, form)
    if not len(cells):
        return Stream(cells)
    at = cursor.at
    transposed = cursor.u32("whether values are transposed")
    if transposed > 1:
        raise cursor.corrupt(f"values are upright (0) or transposed (1), not {transposed}", at)
    at = cursor.at
    num_layers = cursor.u32("the number of layers")
    if num_layers != len(cache.layers):
        raise cursor.corrupt(
            f"{num_layers} layers, where the model has {len(cache.layers)} in its {cache.role} cache", at
        )
    keys = [read_rows(cursor, each.layer, Tensor.KEYS, len(cells), each.key_values) for each in cache.layers]
    read = _read_transposed if transposed else _read_upright
    values = [
        read(cursor, each.layer, len(cells), each.value_values)
        for each in cache.layers
        if each.value_size is not None
    ]
    return Stream(cells, (*keys, *values), bool(transposed))


def _read_upright(cursor: Cursor, layer: int, num_cells: int, values: int) -> ForeignRows:
    return read_rows(cursor, layer, Tensor.VALUES, num_cells, values)


def _read_transposed(cursor: Cursor, layer: int, num_cells: int, values: int) -> ForeignRows:
    what = f"transposed v of layer {layer}"
    found = read_type(cursor, what)
    at = cursor.at
    nbytes, num_values = cursor.u32(f"the bytes of a value of {what}"), cursor.u32(f"the values of {what}")
    if not found.plain or nbytes != found.block_nbytes or num_values != values:
        raise cursor.corrupt(
            f"{what}: {num_values} values of {nbytes} bytes, where the model has {values} of {found.name}", at
        )
    stored = cursor.rows(num_values * num_cells, nbytes, what).view(num_values, num_cells, nbytes)
    upright = stored.transpose(0, 1).contiguous().view(num_cells, num_values * nbytes)
    return ForeignRows(layer, Tensor.VALUES, convertible(found, what), upright)


def _write_rows(rows: ForeignRows, transposed: bool) -> Iterator[Bytes]:
    if not transposed:
        yield from write_rows(rows)
        return
    found = type_of(rows.dtype)
    assert found.plain
    num_cells, row_nbytes = rows.data.shape
    num_values = row_nbytes // found.block_nbytes
    yield struct.pack("<iII", found.number, found.block_nbytes, num_values)
    yield flat(rows.data.reshape(num_cells, num_values, found.block_nbytes).transpose(0, 1))
