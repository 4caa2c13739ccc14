"""Geometries of small models, one for each way that memories are composed; and of the two real ones."""

from __future__ import annotations

from serialization.foreign.geometry import (
    CacheRole,
    CellExtension,
    Geometry,
    LayerRows,
    Pairing,
    RecurrentCache,
    RowsCache,
    StateLayer,
    Window,
)


def rows(role: CacheRole, *layers: int, heads: int = 1, keys: int = 32, values: int | None = 32) -> RowsCache:
    window = Window(4) if role is CacheRole.WINDOW else None
    return RowsCache(role, tuple(LayerRows(each, heads, keys, values, keys) for each in layers), window)


FULL, WINDOW, INDEX = CacheRole.FULL, CacheRole.WINDOW, CacheRole.INDEX
STATEFUL = (StateLayer(0, 6, 8), StateLayer(2, 6, 8))
STATE, LONGER = RecurrentCache(3, STATEFUL), RecurrentCache(5, STATEFUL)

#: name -> what a model of it has
GEOMETRIES = {
    "plain": Geometry("llama", 100, 2, (rows(FULL, 0, 1),)),
    "iswa": Geometry("gemma3", 100, 3, (rows(FULL, 1), rows(WINDOW, 0, 2))),
    "latents": Geometry("deepseek2", 100, 2, (rows(FULL, 0, 1, keys=64, values=None),)),
    "indexed": Geometry(
        "deepseek32", 100, 2, (rows(FULL, 0, 1, keys=64, values=None), rows(INDEX, 0, 1, values=None))
    ),
    "indexed-iswa": Geometry(
        "dots", 100, 3, (rows(FULL, 1, keys=64, values=None), rows(INDEX, 1, values=None), rows(WINDOW, 0, 2))
    ),
    "recurrent": Geometry("mamba", 100, 3, (STATE,)),
    "hybrid": Geometry("jamba", 100, 3, (rows(FULL, 1), STATE)),
    "hybrid-iswa": Geometry(
        "hybrid", 100, 5, (rows(FULL, 1), rows(WINDOW, 3, 4), RecurrentCache(5, STATEFUL))
    ),
    "hybrid-indexed": Geometry("qwen4exp", 100, 3, (rows(FULL, 1), STATE, rows(INDEX, 1, values=None))),
    "pictures": Geometry("qwen2vl", 100, 1, (rows(FULL, 0),), CellExtension.POSITION_2D),
    "tokens": Geometry("ple", 100, 1, (rows(FULL, 0),), CellExtension.TOKEN),
}

SMOLLM2 = Geometry(
    "llama", 49_152, 30, (rows(FULL, *range(30), heads=3, keys=64, values=64),), pairing=Pairing.INTERLEAVED
)
_GEMMA3 = [LayerRows(layer, 1, 256, 256, 256) for layer in range(18)]
GEMMA3 = Geometry(
    "gemma3",
    262_144,
    18,
    (
        RowsCache(FULL, tuple(each for each in _GEMMA3 if each.layer % 6 == 5)),
        RowsCache(WINDOW, tuple(each for each in _GEMMA3 if each.layer % 6 != 5), Window(512)),
    ),
)
