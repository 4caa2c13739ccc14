"""The geometry of an engine's model, as the readers of foreign files ask for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine.cache.memory import KEYS, VALUES, BlocksSpec, PointSpec, RowsSpec, WindowSpec
from engine.cache.table import INDEX
from engine.errors import Unsupported
from engine.remembered import Remembered, memory_form
from engine.state import Value
from engine.verbs import Verbs
from serialization.foreign.geometry import (
    Cache,
    CacheRole,
    Geometry,
    LayerRows,
    RecurrentCache,
    RowsCache,
    StateLayer,
    Window,
)
from serialization.foreign.target import Target
from serialization.manifest import Manifest
from sessions.migrate.families import FAMILIES, Family

#: fields of a fingerprint that say how many layers a model has, rows or not
_LAYERS = ("layers", "config.num_hidden_layers", "config.num_layers")
_LAYER_TYPES = "config.layers_block_type"


def family_of(engine: Verbs) -> Family:
    """Raises Unsupported for a model that llama.cpp has no equivalent of, or none that is known."""
    architecture = str(engine.fingerprint.meaning["architecture"])
    if architecture not in FAMILIES:
        raise Unsupported(f"{architecture}: states of this family in llama.cpp are not known")
    return FAMILIES[architecture]


def target_of(engine: Verbs) -> Target:
    """The memory that rows are put into."""
    what = engine.remembered
    return Target(what.layout, what.rotated)


def source_of(engine: Verbs, manifest: Manifest) -> Target:
    """The memory that the rows of a session of the engine's model were taken out of. Raises ConfigError."""
    needs, meaning = engine.remembered.needs, manifest.fingerprint.meaning
    type_k, type_v = (str(meaning.get(name, "f16")) for name in ("type_k", "type_v"))
    return Target(manifest.layout, memory_form(needs, meaning, type_k, type_v).rotated)


def geometry_of(engine: Verbs) -> Geometry:
    """The shape of the caches that llama.cpp has for the engine's model. Raises Unsupported for families
    that it has no equivalent of, and for those whose memory is of parts that have none there."""
    return _geometry(family_of(engine), engine.remembered, engine.fingerprint.meaning)


def own_geometry_of(engine: Verbs) -> Geometry:
    """The shape of the caches of an engine's model as prompt caches of Python libraries divide them: of any
    family, by the name in its fingerprint, and windows are windows. Raises Unsupported for block rows."""
    meaning = engine.fingerprint.meaning
    return _geometry(Family(str(meaning["architecture"])), engine.remembered, meaning)


def _geometry(family: Family, what: Remembered, meaning: Mapping[str, Value]) -> Geometry:
    if any(isinstance(need, BlocksSpec) for need in what.needs.parts):
        raise Unsupported(f"{family.name}: block rows of other systems are not read")
    rows = [need for need in what.needs.parts if isinstance(need, RowsSpec)]
    full = [need for need in rows if need.name != INDEX and (need.window is None or family.one_cache)]
    windowed = [need for need in rows if need.name != INDEX and need not in full]
    index = [need for need in rows if need.name == INDEX]
    points = [need for need in what.needs.parts if isinstance(need, PointSpec)]
    num_layers = _num_layers(meaning, what)
    caches: list[Cache] = []
    if full:
        caches.append(RowsCache(CacheRole.FULL, _layers(full)))
    if index and windowed:
        caches.append(RowsCache(CacheRole.INDEX, _layers(index)))
    if windowed:
        caches.append(RowsCache(CacheRole.WINDOW, _layers(windowed), _window(windowed)))
    if points:
        caches.append(RecurrentCache(num_layers, _states(points)))
    if index and not windowed:
        caches.append(RowsCache(CacheRole.INDEX, _layers(index)))
    return Geometry(family.name, what.vocab_size, num_layers, tuple(caches), family.extension, family.pairing)


def _layers(needs: Iterable[RowsSpec]) -> tuple[LayerRows, ...]:
    """Keys with the values that are beside them."""
    parts = {(need.layer, need.name): need for need in needs}
    layers = []
    for (layer, name), keys in sorted(parts.items(), key=lambda item: item[0]):
        if name == VALUES:
            continue
        values = parts.get((layer, VALUES)) if name == KEYS else None
        turned = keys.turned
        layers.append(
            LayerRows(
                layer,
                keys.heads,
                keys.size,
                None if values is None else values.size,
                0 if turned is None else turned.rotary.n_rot,
                0 if turned is None else turned.start,
            )
        )
    return tuple(layers)


def _window(needs: Iterable[RowsSpec]) -> Window:
    windows: set[WindowSpec] = {need.window for need in needs if need.window is not None}
    if len(windows) > 1:
        raise Unsupported("layers with windows of several sizes have no equivalent in llama.cpp")
    (window,) = windows
    return Window(window.size, window.chunked)


def _states(points: Iterable[PointSpec]) -> tuple[StateLayer, ...]:
    """A layer's convolution inputs, and the rest of its state."""
    convs: dict[int, int] = {}
    states: dict[int, int] = {}
    for need in points:
        values = 1
        for n in need.shape:
            values *= n
        into = convs if need.name.endswith(".conv") else states
        into[need.layer] = into.get(need.layer, 0) + values
    return tuple(
        StateLayer(layer, convs.get(layer, 0), states.get(layer, 0)) for layer in sorted({*convs, *states})
    )


def _num_layers(meaning: Mapping[str, Value], what: Remembered) -> int:
    """Of the model: the last ones may have nothing to remember."""
    for field in _LAYERS:
        count = meaning.get(field)
        if isinstance(count, int):
            return count
    types = meaning.get(_LAYER_TYPES)
    if isinstance(types, str):
        return len(types.split())
    return 1 + max(need.layer for need in what.needs.parts)
