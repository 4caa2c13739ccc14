"""A llama.cpp file around one sequence: in the form that it was read in, or any other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from engine.errors import Unsupported
from serialization.foreign.cells import cells_of
from serialization.foreign.cursor import Bytes, Words
from serialization.foreign.files import Container, LlamaFile, write_file
from serialization.foreign.foreign_state import ForeignCells, ForeignRows, ForeignState, Tensor, ValueOrder
from serialization.foreign.geometry import CacheRole, CellExtension, Geometry, RecurrentCache, RowsCache
from serialization.foreign.ggml import type_of
from serialization.foreign.grammar import BY_NAME, Grammar, Owners, Scope
from serialization.foreign.kv import Stream
from serialization.foreign.payload import Part
from serialization.foreign.records import Outputs, TokenRecord, record_of
from serialization.foreign.recurrent import RecurrentCells

#: where `ForeignState.details` has the form that it was read in
FORM = "form"


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """How a file holds one sequence: everything in it that is not the sequence's own.

    `stream` of `streams` has its cells, in every cache that has streams; `sequence` is the id that cells
    name as their owner. `merged`: full and sliding layers share one cache. `packed`: tokens as llama-server
    packs them. `record` stands for the tokens where there are media among them; `outputs` for themselves.
    """

    container: Container
    grammar: Grammar
    streams: int = 1
    stream: int = 0
    sequence: int = 0
    merged: bool = False
    packed: bool = False
    record: TokenRecord | None = None
    outputs: Outputs | None = None


#: what is written where nothing else is asked for
NEWEST = Form(Container.SEQUENCE_FILE, BY_NAME["3"])


def file_of(state: ForeignState, geometry: Geometry, form: Form | None = None) -> LlamaFile:
    """A file that holds this sequence alone; in the form it was read in, or as llama.cpp writes sequence
    files today, where no other is given. Raises `Unsupported` for what that form cannot hold."""
    if state.order is not ValueOrder.GGML:
        raise Unsupported("values of these rows are in another order than llama.cpp's: convert them first")
    read_in = state.details.get(FORM)
    if form is None:
        form = read_in if isinstance(read_in, Form) else NEWEST
    if len(state.caches) != sum(isinstance(cache, RowsCache) for cache in geometry.caches):
        raise Unsupported("the caches of a state are not those of the model")
    caches = iter(_merged(state) if form.merged else state.caches)
    parts: list[Part] = []
    for cache in (geometry.merged() if form.merged else geometry).caches:
        if isinstance(cache, RecurrentCache):
            parts.append(_recurrent(state, cache, form))
        else:
            parts.append(_streams(state, next(caches), geometry, cache, form))
    return LlamaFile(
        form.container,
        form.grammar,
        form.merged,
        _record(state, form),
        form.sequence if form.container is Container.SEQUENCE_STATE else None,
        _outputs(form),
        tuple(parts),
    )


def write_container(state: ForeignState, geometry: Geometry, form: Form | None = None) -> Iterator[Bytes]:
    """The bytes of `file_of`, in pieces. Raises what that raises, before the first piece."""
    return write_file(file_of(state, geometry, form), geometry)


def write_sequence_file(state: ForeignState, geometry: Geometry) -> Iterator[Bytes]:
    """A sequence file of version 3, in pieces: for llama.cpp since 26 August 2026 up to 0.5. Raises
    `Unsupported` for a state that such a file of this model cannot hold."""
    return write_container(state, geometry, NEWEST)


def _record(state: ForeignState, form: Form) -> TokenRecord | None:
    if not form.container.stamped:
        return None
    return form.record or record_of(state.tokens or (), form.packed)


def _outputs(form: Form) -> Outputs | None:
    if not form.grammar.outputs:
        return None
    empty = np.empty(0, "<f4")
    return form.outputs or Outputs(np.empty(0, "<i4"), empty, empty)


def _merged(state: ForeignState) -> list[ForeignCells]:
    """Full and sliding layers in one cache. Raises `Unsupported` where they have other cells."""
    own = [cells for cells in state.caches if cells.role is not CacheRole.INDEX]
    first = own[0]
    for cells in own[1:]:
        if not np.array_equal(cells.positions, first.positions) or cells.transposed != first.transposed:
            raise Unsupported("rows of a window cannot be in one cache with those of every token")
    rows = tuple(each for cells in own for each in cells.rows)
    one = ForeignCells(CacheRole.FULL, first.positions, rows, first.extension, first.transposed)
    return [one, *(cells for cells in state.caches if cells.role is CacheRole.INDEX)]


def _streams(
    state: ForeignState, cells: ForeignCells, geometry: Geometry, cache: RowsCache, form: Form
) -> tuple[Stream, ...]:
    owner = None if form.grammar.owners is Owners.NONE else form.sequence
    extension = _extension(cells, state.tokens, geometry, form.grammar)
    widths = {}
    for each in cache.layers:
        widths[each.layer, Tensor.KEYS] = each.key_values
    for each in cache.layers:
        if each.value_size is not None:
            widths[each.layer, Tensor.VALUES] = each.value_values
    rows = _in_order(cells.rows, widths, len(cells.positions))
    for found in rows:
        if cells.transposed and found.tensor is Tensor.VALUES and not type_of(found.dtype).plain:
            raise Unsupported(f"values of {found.dtype} cannot be stored transposed")
    own = Stream(cells_of(cells.positions.astype(np.int32), owner, extension), rows, cells.transposed)
    none = Stream(cells_of(np.empty(0, np.int32), owner))
    return tuple(own if at == form.stream else none for at in range(form.streams))


def _extension(
    cells: ForeignCells, tokens: tuple[int, ...] | None, geometry: Geometry, grammar: Grammar
) -> Words | None:
    """What cells say beside their position: as much of what they said as the layout asks for. What they did
    not say is known for text under M-RoPE alone: there both places are the position, and the id is the
    token's; no other cell needs an id, and gets none (-1). Raises `Unsupported` where it is not known."""
    words = grammar.words(geometry.extension)
    if not words:
        return None
    said = cells.extension
    if said is None or said.shape[1] < words:
        text = len(np.unique(cells.positions)) == len(cells.positions)
        if geometry.extension is not CellExtension.POSITION_2D or (said is None and not text):
            raise Unsupported(f"cells of layout {grammar.name} say more than a position, which is not known")
        places = said if said is not None else np.stack([cells.positions] * 2, 1).astype(np.int32)
        ids = np.full((len(places), 1), -1, np.int32)
        known = (places == cells.positions[:, None]).all(1) & (cells.positions < len(tokens or ()))
        ids[known, 0] = np.array(tokens or (), np.int32)[cells.positions[known]]
        said = np.concatenate([places, ids], 1)
    return said[:, :words]


def _recurrent(state: ForeignState, cache: RecurrentCache, form: Form) -> RecurrentCells:
    if state.point is None:
        raise Unsupported("the model has recurrent state, and there is none to write")
    owner = None if form.grammar.scope is Scope.SEQUENCE else form.sequence
    widths = {(each.layer, Tensor.CONV): each.conv_values for each in cache.layers}
    widths |= {(each.layer, Tensor.STATE): each.state_values for each in cache.layers}
    cells = cells_of(np.array([state.point.position], np.int32), owner)
    return RecurrentCells(cells, _in_order(state.point.rows, widths, 1))


def _in_order(
    rows: tuple[ForeignRows, ...], widths: dict[tuple[int, Tensor], int], num_rows: int
) -> tuple[ForeignRows, ...]:
    """The rows of every (layer, tensor) of `widths`, in its order. Raises `Unsupported` where one is missing,
    is one too many, or has another size than so many values."""
    have = {(each.layer, each.tensor): each for each in rows}
    if have.keys() != widths.keys() or len(have) != len(rows):
        raise Unsupported("the rows of a state are not those of the model")
    for key, values in widths.items():
        expected = (num_rows, type_of(have[key].dtype).row_nbytes(values))
        if tuple(have[key].data.shape) != expected:
            raise Unsupported(f"{key[1]} of layer {key[0]} is not {expected[0]} rows of {expected[1]} bytes")
    return tuple(have[key] for key in widths)
