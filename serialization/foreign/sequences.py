"""One sequence out of what a llama.cpp file holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from engine.errors import AmbiguousFormat, Corrupt, LimitExceeded, UsageError
from serialization.foreign.cells import Cells
from serialization.foreign.containers import FORM, Form
from serialization.foreign.files import LlamaFile
from serialization.foreign.foreign_state import (
    ForeignCells,
    ForeignPoint,
    ForeignRows,
    ForeignState,
    Ints,
    Rotation,
    Tensor,
)
from serialization.foreign.geometry import CacheRole, Geometry, RecurrentCache, RowsCache
from serialization.foreign.grammar import Grammar, Scope
from serialization.foreign.kv import Stream
from serialization.foreign.payload import Part
from serialization.foreign.recurrent import RecurrentCells

#: so many tokens more than twice those that rows are of may be listed
SPARE_TOKENS = 1024


def sequences_in(file: LlamaFile) -> tuple[int, ...]:
    """The ids of the sequences that have cells, rising. Layout 2a names none: then it is 0."""
    if file.grammar.scope is Scope.SEQUENCE:
        return (_own_id(file),)
    found: set[int] = set()
    for part in file.parts:
        for cells in _cells(part):
            found.update(np.unique(cells.owners).tolist())
    return tuple(sorted(found))


def sequence_of(file: LlamaFile, geometry: Geometry, sequence: int | None = None) -> ForeignState:
    """One sequence, the only one where none is named. Rows are views of the file, but where it interleaves
    several sequences. Raises `AmbiguousFormat` where there are several and none is named, `UsageError` for
    one that is not there, `Corrupt` where its cells are in several streams or it has none, `LimitExceeded`
    where it lists far more tokens than it has rows of."""
    found = sequences_in(file)
    if not found:
        raise Corrupt("a llama.cpp state without any cells")
    if sequence is None and len(found) > 1:
        names = ", ".join(map(str, found))
        raise AmbiguousFormat(f"it holds the sequences {names}: say which is meant", sequences=found)
    chosen = found[0] if sequence is None else sequence
    if chosen not in found:
        raise UsageError(f"it holds no sequence {chosen}, but {', '.join(map(str, found))}", sequences=found)
    return _Choice(file, geometry, chosen).state()


@dataclass(frozen=True, slots=True)
class _Choice:
    """One sequence of a file."""

    file: LlamaFile
    geometry: Geometry
    sequence: int

    def state(self) -> ForeignState:
        file = self.file
        caches: list[ForeignCells] = []
        streams: set[tuple[int, int]] = set()
        point = None
        geometry = self.geometry.merged() if file.merged else self.geometry
        for part, cache in zip(file.parts, geometry.caches, strict=True):
            if isinstance(part, RecurrentCells):
                point = self._point(part)
            else:
                assert isinstance(cache, RowsCache)
                at, cells = self._cells(part, cache)
                streams.add((len(part), at))
                caches.append(cells)
        if len(streams) > 1:
            raise Corrupt(f"caches have sequence {self.sequence} in different streams")
        count, stream = next(iter(streams), (1, 0))
        split = tuple(self._split(caches)) if file.merged else tuple(caches)
        form = Form(
            file.container,
            file.grammar,
            count,
            stream,
            self.sequence,
            file.merged,
            packed=file.record is not None and file.record.packed,
            record=file.record if file.record is not None and file.record.num_media else None,
            outputs=file.outputs,
        )
        return ForeignState(
            source=_source(file),
            layout=file.grammar.name,
            tokens=self._tokens(split, point),
            caches=split,
            point=point,
            rotation=_rotation(file.grammar, self.geometry, split),
            notes=tuple(_notes(file)),
            details={FORM: form},
        )

    def _tokens(self, caches: tuple[ForeignCells, ...], point: ForeignPoint | None) -> tuple[int, ...] | None:
        """The ids that the file lists. Raises `LimitExceeded` for far more than there are rows of: numbers of
        ours take more memory than theirs."""
        record = self.file.record
        if record is None or record.ids is None:
            return None
        known = max([len(cells.positions) for cells in caches], default=0)
        if point is not None:
            known = max(known, point.position + 1)
        if len(record.ids) > 2 * known + SPARE_TOKENS:
            raise LimitExceeded(f"it lists {len(record.ids)} tokens, and has rows of {known}")
        return tuple(record.ids.tolist())

    def _cells(self, streams: tuple[Stream, ...], cache: RowsCache) -> tuple[int, ForeignCells]:
        held = [(at, self._indices(stream.cells)) for at, stream in enumerate(streams)]
        held = [(at, indices) for at, indices in held if len(indices)]
        if len(held) != 1:
            raise Corrupt(
                f"the {cache.role} cache has cells of sequence {self.sequence} in {len(held)} streams"
            )
        at, indices = held[0]
        stream = streams[at]
        return at, ForeignCells(
            cache.role,
            stream.cells.positions[indices].astype(np.int64),
            _picked(stream.rows, indices, len(stream.cells)),
            None if stream.cells.extension is None else stream.cells.extension[indices],
            stream.transposed,
        )

    def _point(self, part: RecurrentCells) -> ForeignPoint:
        indices = self._indices(part.cells)
        if len(indices) != 1:
            raise Corrupt(f"{len(indices)} recurrent states of sequence {self.sequence}")
        rows = _picked(part.rows, indices, len(part.cells))
        return ForeignPoint(int(part.cells.positions[indices[0]]), rows)

    def _indices(self, cells: Cells) -> Ints:
        if self.file.grammar.scope is Scope.SEQUENCE:
            return np.arange(len(cells))
        return cells.owned_by(self.sequence)

    def _split(self, caches: list[ForeignCells]) -> Iterator[ForeignCells]:
        """A merged cache as the geometry has it: the same cells for each, and its own layers."""
        merged, *others = caches
        rest = iter(others)
        for cache in self.geometry.caches:
            if isinstance(cache, RecurrentCache):
                continue
            if cache.role is CacheRole.INDEX:
                yield next(rest)
                continue
            layers = {each.layer for each in cache.layers}
            rows = tuple(each for each in merged.rows if each.layer in layers)
            yield ForeignCells(cache.role, merged.positions, rows, merged.extension, merged.transposed)


def _cells(part: Part) -> Iterator[Cells]:
    if isinstance(part, RecurrentCells):
        yield part.cells
    else:
        yield from (stream.cells for stream in part)


def _own_id(file: LlamaFile) -> int:
    """What the cells of a sequence's state say, or the prefix. Raises `Corrupt` where two say otherwise."""
    found = {int(cells.owners[0]) for part in file.parts for cells in _cells(part) if len(cells.owners)} | (
        {file.sequence} if file.sequence is not None else set()
    )
    if len(found) > 1:
        raise Corrupt("the state of one sequence names several")
    return next(iter(found), 0)


def _picked(rows: tuple[ForeignRows, ...], indices: Ints, num_cells: int) -> tuple[ForeignRows, ...]:
    if len(indices) == num_cells:
        return rows
    where = torch.from_numpy(indices)
    return tuple(ForeignRows(each.layer, each.tensor, each.dtype, each.data[where]) for each in rows)


def _source(file: LlamaFile) -> str:
    slot = file.record is not None and file.record.packed
    what = "slot file of llama-server" if slot else f"llama.cpp {file.container}"
    stamp = f", version {file.grammar.version}" if file.container.stamped else ""
    return f"{what}{stamp} (layout {file.grammar.name})"


def _notes(file: LlamaFile) -> Iterator[str]:
    if file.outputs is not None and len(file.outputs.places):
        yield f"outputs of {len(file.outputs.places)} tokens are not taken"
    if file.record is not None and file.record.num_media:
        yield f"{file.record.num_media} media stand among the tokens, which are not taken"


def _rotation(grammar: Grammar, geometry: Geometry, caches: tuple[ForeignCells, ...]) -> Rotation:
    """llama.cpp rotates quantized rows of heads that 64 divides, since April 2026, and no file says so."""
    sizes = {
        (each.layer, tensor): size
        for cache in geometry.caches
        if isinstance(cache, RowsCache)
        for each in cache.layers
        for tensor, size in ((Tensor.KEYS, each.key_size), (Tensor.VALUES, each.value_size or 0))
    }
    may_be = any(
        rows.dtype.startswith("q") and sizes[rows.layer, rows.tensor] % 64 == 0
        for cache in caches
        for rows in cache.rows
    )
    return Rotation.UNKNOWN if may_be and not grammar.unrotated else Rotation.NONE
