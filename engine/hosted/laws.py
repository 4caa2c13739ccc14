"""What each class of layer of a transformers cache keeps, by which of the four laws.

The table is of exact classes: who derives from one may keep something else beside. A layer is made of halves;
a half says which attributes hold tensors, which hold nothing but what follows from those and the length, and
how they are put into an empty layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import cache_utils as upstream

from engine.errors import CacheRefused

#: An object of one of the classes below.
Layer = Any

#: The tensors of one half by the names of its parts: rows as the layer has them, states by "name number".
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class RowsLaw:
    """Rows of one sequence in an attribute: a tensor with sequences along axis `batch`, of which there is
    one, and tokens along axis `tokens`. Of window rows the layer has the last `sliding_window` - 1."""

    name: str
    attribute: str
    tokens: int
    batch: int = 0
    window: bool = False


@dataclass(frozen=True, slots=True)
class StatesLaw:
    """Point state in an attribute: a dict of numbers to tensors, with sequences along the first axis."""

    name: str
    attribute: str


@dataclass(frozen=True, slots=True)
class Half:
    """`beside` are attributes that follow from the tensors and the length. `fill(layer, tensors, length)`
    puts tensors that it may keep into a layer as it was made."""

    rows: tuple[RowsLaw, ...]
    states: tuple[StatesLaw, ...]
    beside: frozenset[str]
    fill: Callable[[Layer, Tensors, int], None]


def _fill_rows(layer: Layer, tensors: Tensors, _: int) -> None:
    keys, values = tensors["kv.k"], tensors["kv.v"]
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values


def _fill_window(layer: Layer, tensors: Tensors, length: int) -> None:
    _fill_rows(layer, tensors, length)
    layer.cumulative_length = length


def _fill_index(layer: Layer, tensors: Tensors, _: int) -> None:
    if "idx.k" in tensors:
        layer.lazy_initialization_indexer(tensors["idx.k"])
        layer.indexer_keys = tensors["idx.k"]
    if "idx.pos" in tensors:
        layer.indexer_position_ids = tensors["idx.pos"]


def _fill_states(layer: Layer, tensors: Tensors, _: int) -> None:
    for name, states in tensors.items():
        of, _space, said = name.partition(" ")
        if not said:
            continue  # it is the other half's
        number = int(said)
        if of == "conv":
            layer.lazy_initialization(conv_states=states, state_idx=number)
            layer.conv_states[number] = states
        else:
            layer.lazy_initialization(recurrent_states=states, state_idx=number)
            layer.recurrent_states[number] = states
        layer.has_previous_state[number] = True


_KEYS = RowsLaw("kv.k", "keys", tokens=2), RowsLaw("kv.v", "values", tokens=2)
_WINDOW_KEYS = tuple(RowsLaw(law.name, law.attribute, law.tokens, window=True) for law in _KEYS)
_OF_ROWS = frozenset({"is_initialized", "dtype", "device"})
_OF_WINDOWS = _OF_ROWS | {"sliding_window", "cumulative_length", "_sliding_window_tensor", "record_past"}
_OF_INDEX = frozenset({"is_indexer_initialized", "indexer_dtype", "indexer_device"})
_OF_STATES = frozenset(
    {
        "number_of_states",
        "is_conv_states_initialized",
        "is_recurrent_states_initialized",
        "has_previous_state",
        "conv_kernel_size",
        "dtype",
        "device",
        "record_past",
    }
)

ROWS = Half(_KEYS, (), _OF_ROWS, _fill_rows)
WINDOW = Half(_WINDOW_KEYS, (), _OF_WINDOWS, _fill_window)
INDEX = Half(
    (
        RowsLaw("idx.k", "indexer_keys", tokens=1),
        RowsLaw("idx.pos", "indexer_position_ids", tokens=2, batch=1),
    ),
    (),
    _OF_INDEX,
    _fill_index,
)
STATES = Half(
    (),
    (StatesLaw("conv", "conv_states"), StatesLaw("state", "recurrent_states")),
    _OF_STATES,
    _fill_states,
)

#: By class, the halves that a layer is made of.
LAWS: Mapping[type, tuple[Half, ...]] = {
    upstream.DynamicLayer: (ROWS,),
    upstream.DynamicSlidingWindowLayer: (WINDOW,),
    upstream.DynamicIndexedLayer: (ROWS, INDEX),
    upstream.LinearAttentionLayer: (STATES,),
    upstream.LinearAttentionAndFullAttentionLayer: (STATES, ROWS),
    upstream.LinearAttentionAndSlidingWindowAttentionLayer: (STATES, WINDOW),
    upstream.DummyLayer: (),  # keeps nothing, and has the attributes to say so
}

#: By class, it and all that derive from it, why it cannot be held.
_REFUSED: Mapping[type, str] = {
    upstream.BaseQuantizedLayer: "its rows are quantized anew as they grow, so that none is written once",
    upstream.StaticLayer: "its rows are written in place, into a buffer of a fixed length",
}


def halves_of(layer: Layer, index: int) -> tuple[Half, ...]:
    """The halves of a layer, the `index`-th of its cache. Raises CacheRefused, naming the class, where it is
    none of the table's."""
    kind = type(layer)
    if kind in LAWS:
        return LAWS[kind]
    for refused, why in _REFUSED.items():
        if issubclass(kind, refused):
            raise CacheRefused(f"layer {index} of the cache is a {kind.__name__}: {why}", layer=index)
    raise CacheRefused(
        f"layer {index} of the cache is a {kind.__name__}, and what such a layer keeps is not known here",
        layer=index,
    )


def check_fields(layer: Layer, index: int) -> None:
    """Raises CacheRefused where a layer has an attribute that its class is not known to have: another release
    of transformers may keep more, or someone put it there."""
    halves = halves_of(layer, index)
    known = {"keys", "values", "is_initialized"}
    for half in halves:
        known |= half.beside | {law.attribute for law in half.rows} | {law.attribute for law in half.states}
    unknown = sorted(vars(layer).keys() - known)
    name = type(layer).__name__
    if unknown:
        raise CacheRefused(
            f"layer {index} of the cache, a {name}, also keeps {', '.join(unknown)}, which is not known here",
            layer=index,
        )
    if vars(layer).get("record_past"):
        raise CacheRefused(f"layer {index} of the cache, a {name}, records its past", layer=index)


def check_cache(cache: object) -> None:
    """Raises CacheRefused unless it is a DynamicCache as transformers makes them, of layers known here."""
    if type(cache) is not upstream.DynamicCache:
        raise CacheRefused(
            f"the model's state is a {type(cache).__name__}, not a DynamicCache: what it keeps is not known"
        )
    if cache.offloading:
        raise CacheRefused("the model's cache is offloaded: its layers come and go between devices")
    unknown = sorted(vars(cache).keys() - {"layers", "layer_class_to_replicate", "offloading"})
    if unknown:
        raise CacheRefused(f"the model's cache also keeps {', '.join(unknown)}, which is not known here")
    for index, layer in enumerate(cache.layers):
        check_fields(layer, index)
