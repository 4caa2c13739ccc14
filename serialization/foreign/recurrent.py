"""Recurrent memory of llama.cpp: point state, a cell for each sequence.

u32 num_cells                         1 in the state of one sequence
of each cell: i32 position, u32 num_owners (0 in the state of one sequence), i32 owner[num_owners]
u32 transposed (0), u32 num_layers    of the model
of each layer with state: i32 type, u64 row_nbytes, R [num_cells, row_nbytes]
of each layer with state: i32 type, u64 row_nbytes, S [num_cells, row_nbytes]
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from serialization.foreign.cells import CellForm, Cells, read_cells, write_cells
from serialization.foreign.cursor import Bytes, Cursor
from serialization.foreign.foreign_state import ForeignRows, Tensor
from serialization.foreign.geometry import RecurrentCache
from serialization.foreign.grammar import Owners, Scope
from serialization.foreign.kv import read_rows, write_rows

#: cells of one sequence say nothing of owners, whatever the version; those of a context do
FORMS = {Scope.SEQUENCE: CellForm(False, Owners.NONE), Scope.CONTEXT: CellForm(False, Owners.ANY)}


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentCells:
    """Cells and their state: R of every layer that has any, then S of the same layers."""

    cells: Cells
    rows: tuple[ForeignRows, ...]


def read_recurrent(cursor: Cursor, cache: RecurrentCache, scope: Scope) -> RecurrentCells:
    """Raises `Corrupt` for what cannot be."""
    start = cursor.at
    cells = read_cells(cursor, FORMS[scope])
    if scope is Scope.SEQUENCE and len(cells) != 1:
        raise cursor.corrupt(f"{len(cells)} recurrent states in the state of one sequence", start)
    at = cursor.at
    if (transposed := cursor.u32("whether states are transposed")) != 0:
        raise cursor.corrupt(f"recurrent states are never transposed, and here is {transposed}", at)
    at = cursor.at
    if (num_layers := cursor.u32("the number of layers")) != cache.num_layers:
        raise cursor.corrupt(f"{num_layers} layers, where the model has {cache.num_layers}", at)
    conv = [read_rows(cursor, each.layer, Tensor.CONV, len(cells), each.conv_values) for each in cache.layers]
    state = [
        read_rows(cursor, each.layer, Tensor.STATE, len(cells), each.state_values) for each in cache.layers
    ]
    return RecurrentCells(cells, (*conv, *state))


def write_recurrent(part: RecurrentCells, cache: RecurrentCache, scope: Scope) -> Iterator[Bytes]:
    """What `read_recurrent` reads."""
    yield from write_cells(part.cells, FORMS[scope])
    yield struct.pack("<II", 0, cache.num_layers)
    for rows in part.rows:
        yield from write_rows(rows)
