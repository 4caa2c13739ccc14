"""Prompt caches of mlx-lm: one safetensors file, made by `save_prompt_cache` (docs/foreign.md).

Its classes are mapped to what our memories are of; nothing is imported or called by a name that a file says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from engine.errors import Corrupt, FingerprintMismatch, UnknownFeature
from serialization.foreign.affine import Packed
from serialization.foreign.assembly import foreign_state
from serialization.foreign.foreign_state import ForeignState
from serialization.foreign.geometry import Geometry, Pairing
from serialization.foreign.held import (
    Floats,
    Held,
    HeldLayer,
    HeldPoint,
    HeldRows,
    Pairings,
    Run,
    Slots,
    plain_name,
)
from serialization.foreign.mlx_tree import Node, Tree, read_tree
from serialization.foreign.tensor_file import Array, quoted, read_tensor_file

#: What a user may save beside a cache: `save_prompt_cache(path, cache, {"tokens": json.dumps(ids)})`.
TOKENS = "tokens"

_MAX_TOKENS = 2**24

#: Architectures, by letters and digits alone, whose keys mlx-lm turns in pairs 2i, 2i + 1 ("traditional").
_INTERLEAVED = frozenset(
    {
        "cohere2",
        "deepseek2",
        "deepseek32",
        "deepseekv2",
        "deepseekv3",
        "deepseekv32",
        "glmdsa",
        "glmmoedsa",
        "llama4",
        "llama4text",
    }
)
_INDEX_INTERLEAVED = frozenset({"glmmoedsa", "glmdsa"})

#: Those whose states mlx-lm keeps as [heads, values, keys], where checkpoints have [heads, keys, values].
_TRANSPOSED = frozenset(
    {"glm5next", "kimilinear", "olmohybrid", "qwen35", "qwen35moe", "qwen35text", "qwen3next"}
)


def read_mlx(buffer: memoryview, geometry: Geometry, tokens: Sequence[int] | None = None) -> ForeignState:
    """The sequence that an mlx-lm prompt cache holds. `tokens` are its ids, for a file that has none.

    Raises Corrupt, LimitExceeded and UnknownFeature for a file that cannot be read, FingerprintMismatch where
    it is not of a model of this geometry.
    """
    tree = read_tree(read_tensor_file(buffer))
    name = plain_name(geometry.architecture)
    caches = [_layer(tree, node, name in _TRANSPOSED) for node in _full(tree)]
    notes = tuple(
        f"the file says {quoted(key)}: {quoted(tree.said[key])}" for key in ("model",) if key in tree.said
    )
    held = Held(
        "a prompt cache of mlx-lm",
        tree.layout,
        dict(zip(_layers(geometry, len(caches)), caches, strict=True)),
        _tokens(tree.said, tokens),
        Pairings(
            Pairing.INTERLEAVED if name in _INTERLEAVED else Pairing.HALVES,
            Pairing.INTERLEAVED if name in _INDEX_INTERLEAVED else Pairing.HALVES,
        ),
        notes,
    )
    return foreign_state(held, geometry)


def _layers(geometry: Geometry, count: int) -> Sequence[int]:
    """Which layer each cache is of: a cache for every layer, or one for those that remember anything."""
    if count == geometry.num_layers:
        return range(count)
    layers = sorted({layer.layer for cache in geometry.caches for layer in cache.layers})
    if len(layers) != count:
        raise FingerprintMismatch(
            f"the file has {count} caches, and the model {geometry.num_layers} layers"
            + (": a draft model's behind them is not taken" if count > geometry.num_layers else "")
        )
    return layers


def _tokens(said: Mapping[str, str], given: Sequence[int] | None) -> tuple[int, ...] | None:
    text = said.get(TOKENS)
    if text is None:
        return None if given is None else tuple(given)
    try:
        ids = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Corrupt("the file's token ids are not JSON") from error
    if not isinstance(ids, list) or len(ids) > _MAX_TOKENS:
        raise Corrupt("the file's token ids are no list")
    if not all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each < 2**32 for each in ids):
        raise Corrupt("the file has token ids that are none")
    return tuple(ids)


def _full(tree: Tree) -> tuple[Node, ...]:
    """The caches, chunked ones with the length that an older mlx-lm did not write: that of the others."""
    plain = [node for node in tree.nodes if node.name == "KVCache" and node.tensors]
    lengths = {_tensor(tree, node, "keys").shape[1] for node in plain}
    nodes = []
    for node in tree.nodes:
        if node.name == "ChunkedKVCache" and "offset" not in node.numbers:
            if len(lengths) != 1:
                raise UnknownFeature("chunked caches that do not say their length, and no other that does")
            node = Node(node.name, node.tensors, {**node.numbers, "offset": min(lengths)})
        nodes.append(node)
    return tuple(nodes)


def _layer(tree: Tree, node: Node, transposed: bool) -> HeldLayer:
    """What one entry of the list of caches holds; a list of its own holds what its caches do."""
    if node.nodes:
        layers = [_layer(tree, each, transposed) for each in node.nodes]
        points = [each.point for each in layers if each.point is not None]
        if len(points) > 1:
            raise UnknownFeature("a layer with two recurrent states is not known here")
        return HeldLayer(tuple(rows for each in layers for rows in each.rows), next(iter(points), None))
    if node.name == "ArraysCache":
        return HeldLayer(point=_point(tree, node, transposed))
    if not node.tensors:
        return HeldLayer()
    return HeldLayer((rows_of(tree, node),))


def _tensor(tree: Tree, node: Node, field: str) -> Floats:
    """Keys or values [heads, slots, size] of a cache."""
    name = node.tensors.get(field)
    if name is None:
        raise Corrupt(f"a {node.name} has no {field}")
    return Floats(tree.floats(name).dtype, _one_sequence(tree.floats(name).values, node.name))


def _one_sequence(values: Array, name: str) -> Array:
    """The only one of a batch: [heads, slots, size] of [1, heads, slots, size]."""
    if values.ndim != 4:
        raise Corrupt(f"a {name} has a tensor of {values.ndim} axes, where 4 belong")
    if values.shape[0] != 1:
        raise UnknownFeature(f"a {name} of a batch of {values.shape[0]} sequences: save each by itself")
    one: Array = values[0]
    return one


def _held(node: Node, keys: Slots, values: Slots, runs: Sequence[Run]) -> HeldRows:
    """Raises Corrupt where keys and values have other slots, or not those of the runs."""
    if keys.shape[:2] != values.shape[:2] or not all(keys.shape):
        raise Corrupt(
            f"a {node.name}: keys of {keys.shape} and values of {values.shape} are none of one cache"
        )
    if any(run.slot < 0 or run.count < 0 or run.slot + run.count > keys.shape[1] for run in runs):
        raise Corrupt(f"a {node.name} says that it holds more rows than it has slots")
    return HeldRows(keys, values, tuple(runs))


def rows_of(tree: Tree, node: Node) -> HeldRows:
    """The rows of a cache that is no list and holds no recurrent state, and where they are in it."""
    return _ROWS[node.name](tree, node)


def _plain(tree: Tree, node: Node) -> HeldRows:
    """All slots up to `offset`; an older mlx-lm wrote no others."""
    keys, values = _tensor(tree, node, "keys"), _tensor(tree, node, "values")
    count = node.numbers.get("offset", keys.shape[1])
    return _held(node, keys, values, (Run(0, 0, count),))


def _chunked(tree: Tree, node: Node) -> HeldRows:
    """Rows from `start_position` on."""
    start, stop = node.numbers.get("start_position", 0), node.numbers.get("offset")
    if stop is None:
        raise UnknownFeature(f"a {node.name} that does not say its length")
    return _held(
        node, _tensor(tree, node, "keys"), _tensor(tree, node, "values"), (Run(0, start, stop - start),)
    )


def _rotating(tree: Tree, node: Node) -> HeldRows:
    """A ring: `keep` slots of the first tokens, then the others, of which the oldest is at `idx`. Before it
    was full once, and where rows were put behind each other, all slots up to `idx` are in order."""
    keys, values = _tensor(tree, node, "keys"), _tensor(tree, node, "values")
    slots = keys.shape[1]
    fields = ("offset", "keep", "idx")
    if not all(field in node.numbers for field in fields):
        raise Corrupt(f"a {node.name} does not say where its rows are")
    offset, keep, idx = (node.numbers[field] for field in fields)
    turned = idx < offset and idx < slots
    held = slots if turned else idx
    if held > slots or held > offset or (turned and idx < keep):
        raise Corrupt(f"a {node.name} of {slots} slots says that the next is {idx}, after {offset} tokens")
    if held == offset:  # nothing was let go
        parts = [(0, held)]
    else:
        parts = [(keep, held)] if not turned else [(idx, slots), (keep, idx)]
    runs = [] if held == offset or not keep else [Run(0, 0, min(keep, held))]
    position = 0 if held == offset else offset - (held - keep)
    for start, stop in parts:
        runs.append(Run(start, position, stop - start))
        position += stop - start
    return _held(node, keys, values, runs)


def _quantized(tree: Tree, node: Node) -> HeldRows:
    """Dequantized: packed values, scales and biases of each."""
    numbers = [node.numbers.get(field) for field in ("bits", "group_size", "offset")]
    if None in numbers:
        raise Corrupt(f"a {node.name} does not say how it is quantized")
    bits, group, count = (number or 0 for number in numbers)
    keys, values = (_packed(tree, node, field, bits, group) for field in ("keys", "values"))
    return _held(node, keys, values, (Run(0, 0, count),))


def _packed(tree: Tree, node: Node, field: str, bits: int, group: int) -> Packed:
    names = [node.tensors.get(f"{field}.{part}") for part in range(3)]
    packed, scales, biases = (name or "" for name in names)
    if None in names or tree.file.entries[packed].dtype != "U32":
        raise Corrupt(f"a {node.name} has no packed {field}, scales and biases")
    floats = [
        Floats(each.dtype, _one_sequence(each.values, node.name))
        for each in (tree.floats(scales), tree.floats(biases))
    ]
    return Packed(_one_sequence(tree.file.array(packed), node.name), floats[0], floats[1], bits, group)


#: How the rows of a class are read. Classes that hold none are read in `_layer`.
_ROWS: Mapping[str, Callable[[Tree, Node], HeldRows]] = {
    "KVCache": _plain,
    "ConcatenateKVCache": _plain,
    "ChunkedKVCache": _chunked,
    "RotatingKVCache": _rotating,
    "QuantizedKVCache": _quantized,
}


def _point(tree: Tree, node: Node, transposed: bool) -> HeldPoint:
    """Arrays of a recurrent layer: inputs of its convolutions [1, inputs, channels], and its state behind
    them; a layer of one array has no state."""
    places = [f"arrays.{number}" for number in range(len(node.tensors))]
    if not places or not node.tensors.keys() == set(places):
        raise UnknownFeature(f"an {node.name} that is empty, padded, or of arrays that are not there")
    arrays = [tree.floats(node.tensors[place]) for place in places]
    if any(each.values.ndim < 2 or each.values.shape[0] != 1 for each in arrays):
        raise UnknownFeature(f"an {node.name} of more than one sequence: save each by itself")
    convs = [Floats(each.dtype, each.values[0]) for each in (arrays[:-1] or arrays)]
    if any(each.values.ndim != 2 for each in convs):
        raise Corrupt(f"an {node.name} has inputs of a convolution that are not [inputs, channels]")
    if len(arrays) == 1:
        return HeldPoint(tuple(convs), None)
    state = arrays[-1].values[0]
    if transposed and state.ndim > 1:
        state = state.swapaxes(-1, -2)
    return HeldPoint(tuple(convs), Floats(arrays[-1].dtype, state))
