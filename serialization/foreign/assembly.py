"""The foreign state that a prompt cache of a Python library is: tensors as rows, in our order of values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from engine.errors import Corrupt, FingerprintMismatch, UnknownFeature
from serialization.foreign.foreign_state import (
    ForeignCells,
    ForeignPoint,
    ForeignRows,
    ForeignState,
    Ints,
    Rotation,
    Tensor,
    ValueOrder,
)
from serialization.foreign.geometry import (
    CacheRole,
    Geometry,
    LayerRows,
    Pairing,
    RecurrentCache,
    RowsCache,
    StateLayer,
    Window,
)
from serialization.foreign.held import Floats, Held, HeldRows, Joined, Run, Slots
from serialization.foreign.tensor_file import Array

#: Slots that are copied at once: what is made of them first is no larger.
_STEP = 64

_STORED: Mapping[str, type[np.generic]] = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}


def foreign_state(held: Held, geometry: Geometry) -> ForeignState:
    """The state that a prompt cache of a model of this geometry is.

    Raises FingerprintMismatch where its layers or sizes are not the model's, Corrupt where rows that are
    needed are not there, or there are fewer token ids than rows, and UnknownFeature for state without either.
    """
    left = {layer: list(each.rows) for layer, each in held.layers.items()}
    caches = []
    for cache in geometry.caches:
        if isinstance(cache, RowsCache):
            rows = {layer.layer: _taken(left, layer.layer, cache.role) for layer in cache.layers}
            pairing = held.pairings.index if cache.role is CacheRole.INDEX else held.pairings.keys
            caches.append(_cells(cache, rows, pairing))
    for layer, more in left.items():
        if more:
            raise FingerprintMismatch(f"layer {layer} holds keys and values that the model's has no use for")
    length = _length(held, caches)
    point = _point(held, geometry, length)
    return ForeignState(
        held.source,
        held.layout,
        held.tokens,
        tuple(caches),
        point,
        Rotation.NONE,
        ValueOrder.OURS,
        held.notes,
    )


def known_layers(geometry: Geometry) -> int:
    """How many layers anything of the model may be of: some count two for each of theirs."""
    last = max((layer.layer for cache in geometry.caches for layer in cache.layers), default=-1)
    return max(geometry.num_layers, last + 1)


def _taken(left: dict[int, list[HeldRows]], layer: int, role: CacheRole) -> HeldRows:
    if not left.get(layer):
        raise FingerprintMismatch(f"layer {layer} holds no rows of a {role} cache, and the model's has one")
    return left[layer].pop(0)


def _cells(cache: RowsCache, held: Mapping[int, HeldRows], pairing: Pairing) -> ForeignCells:
    """One cache: its layers have rows of the same positions, and as many as are needed to go on."""
    runs = {layer: _last_runs(cache, layer, rows) for layer, rows in held.items()}
    bounds = {(each[0].position, each[-1].stop) for each in runs.values()}
    if len(bounds) > 1:
        raise Corrupt(f"layers of the {cache.role} cache hold rows of different positions")
    start, stop = bounds.pop() if bounds else (0, 0)
    keys, values = [], []
    for shape in cache.layers:
        k, v = _tensors(shape, held[shape.layer])
        mine = runs[shape.layer]
        keys.append(_rows(shape.layer, Tensor.KEYS, k, mine, turns_of(shape, pairing)))
        if v is not None:
            values.append(_rows(shape.layer, Tensor.VALUES, v, mine, None))
    return ForeignCells(cache.role, np.arange(start, stop), (*keys, *values))


def _last_runs(cache: RowsCache, layer: int, rows: HeldRows) -> tuple[Run, ...]:
    """The runs that follow each other up to the last token. Rows before a hole are of no use: a ring may keep
    those of the beginning of a prompt."""
    last: list[Run] = []
    for run in reversed([run for run in rows.runs if run.count]):
        if last and run.stop != last[0].position:
            break
        last.insert(0, run)
    if not last:
        raise Corrupt(f"layer {layer} holds no row")
    needed = 0 if cache.window is None else _needed_from(cache.window, rows.length)
    if last[0].position > needed:
        raise Corrupt(
            f"layer {layer}: rows are needed from token {needed:,} on, and none is there before"
            f" {last[0].position:,}"
        )
    return tuple(last)


def _needed_from(window: Window, length: int) -> int:
    """The first position that the next token may see."""
    if window.chunked:
        return length // window.size * window.size
    return max(0, length - window.size + 1)


def _tensors(shape: LayerRows, rows: HeldRows) -> tuple[Slots, Slots | None]:
    """Keys and values in the model's sizes. A latent may be in two tensors: itself, and what RoPE turned."""
    keys, values = rows.keys, rows.values
    heads, _, size = keys.shape
    if shape.value_size is None and values is not None:
        turned = values.shape[-1]
        joins = (heads, size + turned) == (shape.kv_heads, shape.key_size)
        if joins and shape.n_rot in (0, turned) and values.dtype == keys.dtype:
            turned_first = shape.n_rot and shape.rot_start == 0
            return (Joined(values, keys) if turned_first else Joined(keys, values)), None
        values = None
    found = (heads, size, None if values is None else values.shape[-1])
    if found != (shape.kv_heads, shape.key_size, shape.value_size):
        raise FingerprintMismatch(
            f"layer {shape.layer} holds {_sizes(*found)}, and the model's"
            f" {_sizes(shape.kv_heads, shape.key_size, shape.value_size)}"
        )
    return keys, values


def _sizes(heads: int, key: int, value: int | None) -> str:
    return f"{heads} heads of {key} values" + ("" if value is None else f" and {value}")


def turns_of(shape: LayerRows, pairing: Pairing) -> Ints | None:
    """Where each value of a head comes from, so that RoPE turns i with i + n/2; None if all are in place.
    A layer without RoPE has the order that it would have with it: weights are put in order alike."""
    if pairing is Pairing.HALVES:
        return None
    order = np.arange(shape.key_size)
    start, stop = shape.rot_start, shape.rot_start + (shape.n_rot or shape.key_size)
    order[start:stop] = np.concatenate([order[start:stop:2], order[start + 1 : stop : 2]])
    return order


def _rows(layer: int, tensor: Tensor, held: Slots, runs: Sequence[Run], turns: Ints | None) -> ForeignRows:
    """Slots of [heads, slots, size] as rows of [heads, size], in the order of `runs`."""
    heads, _, size = held.shape
    at = 0
    rows = np.empty((sum(run.count for run in runs), heads, size), _STORED[held.dtype])
    for run in runs:
        for start in range(run.slot, run.slot + run.count, _STEP):
            some = held.rows(start, min(start + _STEP, run.slot + run.count))
            rows[at : at + len(some)] = some if turns is None else some[..., turns]
            at += len(some)
    return ForeignRows(layer, tensor, held.dtype, _bytes(rows, at))


def _bytes(values: Array, rows: int) -> torch.Tensor:
    """Contiguous values [rows, ...] as uint8 [rows, bytes]."""
    return torch.from_numpy(values.reshape(rows, -1).view(np.uint8))


def _length(held: Held, caches: Sequence[ForeignCells]) -> int:
    """After how many tokens the state is; all that is there says the same."""
    lengths = {int(cells.positions[-1]) + 1 for cells in caches}
    if held.length is not None:
        lengths.add(held.length)
    if len(lengths) > 1:
        raise Corrupt(f"what is there is of different lengths: {', '.join(map(str, sorted(lengths)))} tokens")
    if lengths:
        (length,) = lengths
        if held.tokens is not None and len(held.tokens) < length:
            raise Corrupt(f"there are {len(held.tokens):,} token ids for the rows of {length:,} tokens")
        return length
    if not held.tokens:
        raise UnknownFeature(
            "nothing in the file says after how many tokens its state is: save it with its token ids"
        )
    return len(held.tokens)


def _point(held: Held, geometry: Geometry, length: int) -> ForeignPoint | None:
    needed = {
        layer.layer: layer
        for cache in geometry.caches
        if isinstance(cache, RecurrentCache)
        for layer in cache.layers
    }
    found = {layer for layer, each in held.layers.items() if each.point is not None}
    if found != needed.keys():
        odd = min(found ^ needed.keys())
        whose = (
            "holds recurrent state, and the model's has none" if odd in found else "holds no recurrent state"
        )
        raise FingerprintMismatch(f"layer {odd} {whose}")
    if not needed:
        return None
    convs, states = [], []
    for layer, shape in sorted(needed.items()):
        point = held.layers[layer].point
        assert point is not None
        if shape.conv_values:
            convs.append(_conv(shape, point.convs))
        elif point.convs:
            raise FingerprintMismatch(
                f"layer {layer} holds inputs of a convolution, and the model's has none"
            )
        if (point.state is not None) != bool(shape.state_values):
            raise FingerprintMismatch(f"layer {layer}: its state is there or missing, other than the model's")
        if point.state is not None:
            if point.state.values.size != shape.state_values:
                raise FingerprintMismatch(
                    f"layer {layer}: a state of {point.state.values.size:,} values, and the model's has"
                    f" {shape.state_values:,}"
                )
            states.append(
                ForeignRows(
                    layer, Tensor.STATE, point.state.dtype, _bytes(np.array(point.state.values, order="C"), 1)
                )
            )
    return ForeignPoint(length - 1, (*convs, *states))


def _conv(shape: StateLayer, convs: Sequence[Floats]) -> ForeignRows:
    """The last inputs of a layer's convolutions, side by side. Of more than are needed the last count."""
    channels = sum(conv.values.shape[-1] for conv in convs)
    inputs, rest = divmod(shape.conv_values, channels) if channels else (0, 1)
    fits = all(len(conv.values) >= inputs and conv.dtype == convs[0].dtype for conv in convs)
    if rest or not fits:
        raise FingerprintMismatch(
            f"layer {shape.layer}: inputs of a convolution of {channels:,} channels do not make the"
            f" {shape.conv_values:,} values of the model's"
        )
    last = [conv.values[len(conv.values) - inputs :] for conv in convs]
    return ForeignRows(shape.layer, Tensor.CONV, convs[0].dtype, _bytes(np.concatenate(last, axis=1), 1))
