"""Our rows as a foreign state has them: `convert.py` the other way round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.errors import Corrupt, FingerprintMismatch, Unsupported
from engine.state import Layout, PartKind, PartSpec, Rows, parts_of
from serialization.foreign.conversion import Conversion, Report
from serialization.foreign.foreign_state import (
    ForeignCells,
    ForeignRows,
    ForeignState,
    Rotation,
    Tensor,
    ValueOrder,
)
from serialization.foreign.forms import move
from serialization.foreign.geometry import CacheRole, Geometry, RowsCache
from serialization.foreign.target import Place, Target, foreign_form, own_form, place_of
from serialization.values import is_quantized


@dataclass(frozen=True, slots=True)
class Wanted:
    """How the rows are to be written: the dtypes of keys and values, in which order, quantized ones rotated
    or not, values a channel at a time or not."""

    type_k: str
    type_v: str
    order: ValueOrder = ValueOrder.GGML
    rotation: Rotation = Rotation.ROTATED
    transposed: bool = False

    def dtype(self, tensor: Tensor) -> str:
        return self.type_k if tensor is Tensor.KEYS else self.type_v


def to_foreign(
    source: str,
    target: Target,
    geometry: Geometry,
    rows: Sequence[Rows],
    tokens: tuple[int, ...],
    wanted: Wanted,
) -> tuple[ForeignState, Conversion]:
    """Our `rows`, those of `tokens` in the layout of `target`, as a foreign state of `geometry`. Of window
    rows it has those that the last token may see, as llama.cpp writes them.

    Raises FingerprintMismatch where layers have no rows, Corrupt where rows are missing, Unsupported for
    recurrent state.
    """
    report = Report()
    specs = {place_of(spec): spec for spec in target.layout if spec.kind is not PartKind.POINT}
    caches = []
    for cache in geometry.caches:
        if not isinstance(cache, RowsCache):
            raise Unsupported("recurrent state is not written for other systems")
        start = _start(cache, len(tokens))
        out = []
        for place in _places(cache):
            if place not in specs:
                raise FingerprintMismatch(f"there are no {place.tensor} rows of layer {place.layer}")
            spec = specs[place]
            data = _between(rows, target.layout, spec, start, len(tokens))
            own = own_form(spec, geometry, target)
            layer = next(each for each in cache.layers if each.layer == place.layer)
            rotated = wanted.rotation is Rotation.ROTATED
            dtype = wanted.dtype(place.tensor)
            form = foreign_form(layer, place.tensor, dtype, wanted.order, geometry.pairing, rotated)
            moved = move(data, own, form)
            report.add(place.tensor, own, form, moved.loss)
            out.append(ForeignRows(place.layer, place.tensor, dtype, moved.data))
        positions = np.arange(start, len(tokens), dtype=np.int64)
        caches.append(ForeignCells(cache.role, positions, tuple(out), transposed=wanted.transposed))
    quantized = is_quantized(wanted.type_k) or is_quantized(wanted.type_v)
    rotation = wanted.rotation if quantized else Rotation.NONE
    state = ForeignState(source, "", tokens, tuple(caches), rotation=rotation, order=wanted.order)
    return state, report.conversion()


def _start(cache: RowsCache, length: int) -> int:
    """Where rows of a cache begin: llama.cpp drops what its last token does not see (`last - pos >=
    n_swa`)."""
    if cache.window is None or not length:
        return 0
    last, size = length - 1, cache.window.size
    return last // size * size if cache.window.chunked else max(0, last - size + 1)


def _places(cache: RowsCache) -> Iterator[Place]:
    """All keys before all values, as files have them."""
    index = cache.role is CacheRole.INDEX
    for layer in cache.layers:
        yield Place(layer.layer, Tensor.KEYS, index)
    for layer in cache.layers:
        if layer.value_size is not None:
            yield Place(layer.layer, Tensor.VALUES, index)


def _between(rows: Sequence[Rows], layout: Layout, spec: PartSpec, start: int, stop: int) -> torch.Tensor:
    """The rows of a part for tokens [start, stop). Raises Corrupt where there are not all."""
    index, at, runs = parts_of(layout, spec.kind).index(spec), start, []
    for run in rows:
        if run.kind is spec.kind and run.start <= at < min(run.stop, stop):
            end = min(run.stop, stop)
            runs.append(run.parts[index][at - run.start : end - run.start].cpu())
            at = end
    if at != stop:
        raise Corrupt(f"part {spec.name}: rows are needed from token {start:,} on, and {at:,} is missing")
    return torch.cat(runs) if runs else torch.empty((0, spec.row_nbytes), dtype=torch.uint8)
