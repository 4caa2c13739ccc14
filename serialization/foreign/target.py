"""Which rows of a foreign state are which part of a memory of ours, and how both write them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.errors import FingerprintMismatch, Unsupported
from engine.state import Layout, PartSpec
from serialization.foreign.foreign_state import ForeignState, Tensor, ValueOrder
from serialization.foreign.forms import Form
from serialization.foreign.geometry import CacheRole, Geometry, LayerRows, Pairing, RowsCache
from serialization.values import is_quantized

#: llama.cpp rotates quantized heads of a multiple of so many values
ROTATED_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class Target:
    """The memory that rows are for, or come from: its layout, and for parts that are stored Hadamard-rotated
    how many values are rotated together, by the part's name."""

    layout: Layout
    rotated: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a foreign state has the rows of a part: of a layer, of an indexer's cache or not."""

    layer: int
    tensor: Tensor
    index: bool = False


_TENSORS = {"kv.k": (Tensor.KEYS, False), "kv.v": (Tensor.VALUES, False), "idx.k": (Tensor.KEYS, True)}


def place_of(spec: PartSpec) -> Place:
    """Raises Unsupported for a part that no foreign state has an equivalent of."""
    name = spec.name.rpartition(".")[0]
    if name not in _TENSORS:
        raise Unsupported(f"{name}: no foreign state has such rows; its token ids can be read anew")
    return Place(spec.layer, *_TENSORS[name])


def layer_of(geometry: Geometry, place: Place) -> LayerRows:
    """Raises FingerprintMismatch where the geometry has no rows there."""
    for cache in geometry.caches:
        if isinstance(cache, RowsCache) and (cache.role is CacheRole.INDEX) is place.index:
            for layer in cache.layers:
                if layer.layer == place.layer:
                    return layer
    raise FingerprintMismatch(f"layer {place.layer} of a {geometry.architecture} model has no such rows")


def own_form(spec: PartSpec, geometry: Geometry, target: Target) -> Form:
    """How `target` writes the rows of a part."""
    place = place_of(spec)
    heads, size = (1, *spec.shape)[-2:]
    n_rot = layer_of(geometry, place).n_rot if place.tensor is Tensor.KEYS else 0
    return Form(spec.dtype, heads, size, n_rot, Pairing.HALVES, target.rotated.get(spec.name, 0))


def foreign_form(
    layer: LayerRows, tensor: Tensor, dtype: str, order: ValueOrder, pairing: Pairing, rotated: bool
) -> Form:
    """How a foreign state writes the rows of a tensor. Where they are `rotated`, llama.cpp does it to
    quantized keys by the largest power of two that divides a head, and to quantized values by 64 (PR
    #21038)."""
    keys = tensor is Tensor.KEYS
    size = layer.key_size if keys else layer.value_size or 0
    n_rot = layer.n_rot if keys else 0
    if order is ValueOrder.OURS:
        return Form(dtype, layer.kv_heads, size, n_rot)
    if keys and layer.rot_start:
        raise Unsupported("keys that RoPE turned the last values of are not converted")
    block = 0
    if rotated and is_quantized(dtype) and size % ROTATED_MULTIPLE == 0:
        block = size & -size if keys else ROTATED_MULTIPLE
    return Form(dtype, layer.kv_heads, size, n_rot, pairing, block)


def may_be_rotated(state: ForeignState, geometry: Geometry) -> bool:
    """Whether it makes a difference if the state's quantized rows were rotated."""
    for cells in state.caches:
        for rows in cells.rows:
            layer = layer_of(geometry, Place(rows.layer, rows.tensor, cells.role is CacheRole.INDEX))
            if foreign_form(layer, rows.tensor, rows.dtype, state.order, geometry.pairing, True).block:
                return True
    return False
