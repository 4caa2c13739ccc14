"""A dump of a transformers `DynamicCache`: a safetensors file of our own making, written by its user.

transformers has no format for a cache, and pickles of one are never opened here. docs/foreign.md has the two
functions that write and load this file, which need torch, safetensors and transformers alone, and its layout:

metadata: `format`, `version`, `kinds` (a word of `Kind` for every layer, with spaces between), `length`
(tokens that the cache has seen), and perhaps `model_type` (transformers' name of the architecture).

| tensor       | shape                      | of layers that are              |
|--------------|----------------------------|---------------------------------|
| `tokens`     | int64 [length or more]     | (the ids; may be missing)       |
| `N.keys`     | [1, heads, rows, size]     | full, sliding, indexed          |
| `N.values`   | [1, heads, rows, size]     | full, sliding, indexed          |
| `N.index`    | [1, rows, size]            | indexed                         |
| `N.conv.I`   | [1, channels, inputs]      | linear: the last inputs, I by I |
| `N.state`    | [1, ...]                   | linear, where there is a state  |

A full or indexed layer has a row for every token, a sliding one those that end with the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum

import numpy as np

from engine.errors import Corrupt, FingerprintMismatch, UnknownFeature, UnknownVersion, Unsupported
from serialization.foreign.assembly import foreign_state, known_layers, turns_of
from serialization.foreign.foreign_state import (
    ForeignCells,
    ForeignRows,
    ForeignState,
    Ints,
    Tensor,
    ValueOrder,
)
from serialization.foreign.geometry import CacheRole, Geometry, LayerRows, Pairing, RowsCache, Window
from serialization.foreign.held import (
    FLOATS,
    Floats,
    Held,
    HeldLayer,
    HeldPoint,
    HeldRows,
    Pairings,
    Run,
    plain_name,
)
from serialization.foreign.tensor_file import Array, TensorFile, quoted, read_tensor_file, write_tensor_file

FORMAT = "tenuto.transformers-cache"
VERSION = "1"


class Kind(StrEnum):
    """What a layer of a cache holds."""

    FULL = "full"
    SLIDING = "sliding"
    INDEXED = "indexed"
    LINEAR = "linear"
    LINEAR_FULL = "linear+full"
    LINEAR_SLIDING = "linear+sliding"
    NONE = "none"


_LINEAR = frozenset({Kind.LINEAR, Kind.LINEAR_FULL, Kind.LINEAR_SLIDING})
_SLIDING = frozenset({Kind.SLIDING, Kind.LINEAR_SLIDING})
_ROWLESS = frozenset({Kind.LINEAR, Kind.NONE})

_TOKENS = "tokens"
_MAX_LENGTH = 2**24

#: Architectures, by letters and digits alone, whose keys transformers turns in pairs 2i, 2i + 1.
_INTERLEAVED = frozenset({"cohere2", "deepseekv2", "llama4", "llama4text"})

#: safetensors' names of our dtypes.
_SAID: Mapping[str, str] = {ours: theirs for theirs, ours in FLOATS.items()}


def is_torch_dump(metadata: Mapping[str, str]) -> bool:
    return metadata.get("format") == FORMAT


def read_torch_dump(
    buffer: memoryview, geometry: Geometry, tokens: Sequence[int] | None = None
) -> ForeignState:
    """The sequence that a dump holds. `tokens` are its ids, for a file that has none.

    Raises Corrupt, LimitExceeded, UnknownVersion and UnknownFeature for a file that cannot be read,
    FingerprintMismatch where it is not of a model of this geometry.
    """
    file = read_tensor_file(buffer)
    if not is_torch_dump(file.metadata):
        raise UnknownFeature(f"the file does not say that its format is {FORMAT}")
    if file.metadata.get("version") != VERSION:
        raise UnknownVersion(
            f"version {quoted(file.metadata.get('version', ''))} of {FORMAT} is not read here"
        )
    kinds = _kinds(file)
    if len(kinds) > known_layers(geometry):
        raise FingerprintMismatch(f"the file has {len(kinds)} layers, and the model {known_layers(geometry)}")
    length = _length(file)
    found = _Tensors(file)
    layers = {number: _layer(found, number, kind, length) for number, kind in enumerate(kinds)}
    ids = _token_ids(found)
    found.end()
    model = file.metadata.get("model_type")
    held = Held(
        "a dump of a transformers cache",
        f"{FORMAT} {VERSION}",
        layers,
        ids if ids is not None else None if tokens is None else tuple(tokens),
        Pairings(_pairing(model, geometry)),
        () if model is None else (f"the file says 'model_type': {quoted(model)}",),
        length,
    )
    return foreign_state(held, geometry)


def _pairing(model: str | None, geometry: Geometry) -> Pairing:
    return (
        Pairing.INTERLEAVED if plain_name(model or geometry.architecture) in _INTERLEAVED else Pairing.HALVES
    )


def _kinds(file: TensorFile) -> list[Kind]:
    words = file.metadata.get("kinds", "").split(" ")
    for word in words:
        if word not in set(Kind):
            raise UnknownFeature(f"a layer that is {quoted(word)} is not known here")
    return [Kind(word) for word in words]


def _length(file: TensorFile) -> int:
    text = file.metadata.get("length", "")
    if not (text.isascii() and text.isdecimal() and len(text) < 12 and 0 < int(text) <= _MAX_LENGTH):
        raise Corrupt(f"a cache of {quoted(text)} tokens is none")
    return int(text)


class _Tensors:
    """The tensors of a file, each of which must be asked for."""

    def __init__(self, file: TensorFile) -> None:
        self._file = file
        self._left = set(file.entries)

    def __contains__(self, name: str) -> bool:
        return name in self._file.entries

    def one(self, name: str, axes: int) -> Floats:
        """Values of a tensor without its first axis, which is of one sequence."""
        if name not in self._file.entries:
            raise Corrupt(f"tensor {name} is missing")
        entry = self._file.entries[name]
        if entry.dtype not in FLOATS:
            raise UnknownFeature(f"tensor {name} is of {entry.dtype}: values are {', '.join(FLOATS)}")
        if len(entry.shape) < 2 or (axes and len(entry.shape) != axes):
            raise Corrupt(f"tensor {name} has {len(entry.shape)} axes")
        if entry.shape[0] != 1:
            raise UnknownFeature(f"tensor {name} is of a batch of {entry.shape[0]} sequences")
        self._left.discard(name)
        return Floats(FLOATS[entry.dtype], self._file.array(name)[0])

    def tokens(self) -> Array:
        entry = self._file.entries[_TOKENS]
        if entry.dtype != "I64" or len(entry.shape) != 1 or entry.shape[0] > _MAX_LENGTH:
            raise Corrupt(f"tensor {_TOKENS} is not a list of ids")
        self._left.discard(_TOKENS)
        return self._file.array(_TOKENS)

    def end(self) -> None:
        """Raises Corrupt if any was not."""
        if self._left:
            raise Corrupt(f"tensor {quoted(min(self._left))} is of no layer")


def _token_ids(found: _Tensors) -> tuple[int, ...] | None:
    if _TOKENS not in found:
        return None
    ids = found.tokens()
    if ids.size and (ids.min() < 0 or ids.max() >= 2**32):
        raise Corrupt("the file has token ids that are none")
    return tuple(ids.tolist())


def _layer(found: _Tensors, number: int, kind: Kind, length: int) -> HeldLayer:
    rows = []
    if kind not in _ROWLESS:
        keys, values = found.one(f"{number}.keys", 4), found.one(f"{number}.values", 4)
        rows.append(_rows(number, keys, values, length))
    if kind is Kind.INDEXED:
        index = found.one(f"{number}.index", 3)
        rows.append(_rows(number, Floats(index.dtype, index.values[None]), None, length))
    if kind not in _SLIDING and any(each.runs[0].position for each in rows):
        raise Corrupt(f"layer {number} has not the rows of all {length:,} tokens")
    if kind not in _LINEAR:
        return HeldLayer(tuple(rows))
    convs: list[Floats] = []
    while (name := f"{number}.conv.{len(convs)}") in found:
        conv = found.one(name, 3)
        convs.append(Floats(conv.dtype, conv.values.T))
    state = found.one(f"{number}.state", 0) if f"{number}.state" in found else None
    return HeldLayer(tuple(rows), HeldPoint(tuple(convs), state))


def _rows(number: int, keys: Floats, values: Floats | None, length: int) -> HeldRows:
    heads, count, _ = keys.values.shape
    if values is not None and values.values.shape[:2] != (heads, count):
        raise Corrupt(f"layer {number} has keys of {keys.values.shape} and values of {values.values.shape}")
    if not keys.values.size or count > length:
        raise Corrupt(f"layer {number} has {count:,} rows of {length:,} tokens")
    return HeldRows(keys, values, (Run(0, length - count, count),))


def write_torch_dump(
    state: ForeignState, geometry: Geometry, model_type: str | None = None
) -> Iterator[bytes | memoryview]:
    """The dump of a state whose values are in our order; `model_type` is what transformers calls the model.

    Of a window as many rows are written as transformers keeps: one fewer than it is wide. Raises Unsupported
    for recurrent state, latents, quantized rows, and values in another order; Corrupt where rows are missing.
    """
    if state.order is not ValueOrder.OURS or state.point is not None:
        raise Unsupported(
            "recurrent state, and rows in the order of llama.cpp, are not written for transformers"
        )
    kinds = [Kind.NONE] * known_layers(geometry)
    arrays: dict[str, tuple[str, Array]] = {}
    if state.tokens is not None:
        arrays[_TOKENS] = "I64", np.array(state.tokens, np.int64)
    pairing = _pairing(model_type, geometry)
    for cells in state.caches:
        cache = next(
            each for each in geometry.caches if isinstance(each, RowsCache) and each.role is cells.role
        )
        shapes = {shape.layer: shape for shape in cache.layers}
        chosen = _chosen(cells, state.length, cache.window)
        for rows in cells.rows:
            if rows.dtype not in _SAID:
                raise Unsupported(
                    f"rows of {rows.dtype} are not written for transformers: re-encode them first"
                )
            name, array = _tensor(cells.role, shapes[rows.layer], rows, pairing)
            arrays[f"{rows.layer}.{name}"] = _SAID[rows.dtype], array[..., chosen, :]
            kinds[rows.layer] = _KINDS[cells.role]
    said = {"format": FORMAT, "version": VERSION, "kinds": " ".join(kinds), "length": str(state.length)}
    return write_tensor_file(arrays, said if model_type is None else {**said, "model_type": model_type})


_KINDS = {CacheRole.FULL: Kind.FULL, CacheRole.WINDOW: Kind.SLIDING, CacheRole.INDEX: Kind.INDEXED}


def _chosen(cells: ForeignCells, length: int, window: Window | None) -> Ints:
    """Which cells are written, in the order of positions."""
    count = length if window is None else min(length, window.size - 1)
    order = np.argsort(cells.positions, kind="stable")[-count:] if count else np.zeros(0, np.int64)
    if not np.array_equal(cells.positions[order], np.arange(length - count, length)):
        raise Corrupt(f"the {cells.role} cache has not a row for each of the last {count:,} tokens")
    return order


def _tensor(role: CacheRole, shape: LayerRows, rows: ForeignRows, pairing: Pairing) -> tuple[str, Array]:
    """A tensor's name and its values: [1, heads, rows, size], or [1, rows, size] of an indexer."""
    size = shape.key_size if rows.tensor is Tensor.KEYS else shape.value_size
    if size is None or (shape.value_size is None and role is not CacheRole.INDEX):
        raise Unsupported(f"layer {shape.layer} keeps latents, and transformers what is made of them")
    data = rows.data.numpy()
    values = data.view(_VALUES[rows.dtype]).reshape(len(data), shape.kv_heads, size)
    turns = turns_of(shape, pairing) if rows.tensor is Tensor.KEYS and role is not CacheRole.INDEX else None
    if turns is not None:
        values = values[..., np.argsort(turns)]
    if role is CacheRole.INDEX:
        return "index", values[None, :, 0]
    return "keys" if rows.tensor is Tensor.KEYS else "values", values.transpose(1, 0, 2)[None]


_VALUES: Mapping[str, str] = {"f32": "<f4", "f16": "<f2", "bf16": "<u2"}
