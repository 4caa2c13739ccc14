"""The memory in a llama.cpp state: its caches one behind the other, as the model's geometry lists them.

A plain memory is one KV cache; sliding windows are two of them; a hybrid has recurrent state behind its KV
caches; an indexer's keys are a KV cache more. What a model has is data: nothing here asks for its kind.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from engine.errors import UnknownFeature
from serialization.foreign.cells import CellForm
from serialization.foreign.cursor import Bytes, Cursor
from serialization.foreign.geometry import CellExtension, Geometry, RecurrentCache
from serialization.foreign.grammar import Grammar
from serialization.foreign.kv import Stream, read_kv, write_kv
from serialization.foreign.recurrent import RecurrentCells, read_recurrent, write_recurrent

#: one cache: the streams of a KV cache, or recurrent state
Part = tuple[Stream, ...] | RecurrentCells

#: the one memory that names itself
DSV4 = struct.pack("<I", 0x34565344)


def read_payload(cursor: Cursor, geometry: Geometry, grammar: Grammar) -> tuple[Part, ...]:
    """A part for each of the geometry's caches; all bytes are read. Raises `Corrupt` where they are not of
    this layout and geometry."""
    if cursor.data[cursor.at : cursor.at + 4] == DSV4:
        raise UnknownFeature("the memory of a DeepSeek-V4 model: its compressed rows are not converted")
    parts: list[Part] = []
    for cache in geometry.caches:
        if isinstance(cache, RecurrentCache):
            parts.append(read_recurrent(cursor, cache, grammar.scope))
        else:
            parts.append(read_kv(cursor, cache, cell_form(geometry, grammar)))
    if cursor.left:
        raise cursor.corrupt(f"{cursor.left} bytes too many")
    return tuple(parts)


def write_payload(parts: tuple[Part, ...], geometry: Geometry, grammar: Grammar) -> Iterator[Bytes]:
    """What `read_payload` reads."""
    for part, cache in zip(parts, geometry.caches, strict=True):
        if isinstance(cache, RecurrentCache):
            assert isinstance(part, RecurrentCells)
            yield from write_recurrent(part, cache, grammar.scope)
        else:
            assert isinstance(part, tuple)
            yield from write_kv(part, cache, cell_form(geometry, grammar))


def cell_form(geometry: Geometry, grammar: Grammar) -> CellForm:
    """How a layout writes the cells of this model's KV caches."""
    return CellForm(
        grammar.streams,
        grammar.owners,
        grammar.words(geometry.extension),
        geometry.extension is CellExtension.POSITION_2D,
    )
