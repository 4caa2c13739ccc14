"""The kinds of memory: which parts belong together, by the name that a model asks for.

Every kind is built of the same four kinds of part by `PartsMemory`; what makes it a kind is which of them
it has. Branching on the kind ends here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.cache.cells import CellTable
from engine.cache.dsv4 import HEAVY_KEYS, INDEX_KEYS, SPARSE_KEYS
from engine.cache.iswa import window_table
from engine.cache.memory import KEYS, VALUES, MemorySpec, PartNeed, PointSpec, RowsSpec
from engine.cache.parts_memory import PartsMemory
from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Kind:
    """The parts that a kind must have, and those that it may have beside them, by name. With `point_state`
    there may be any point parts, and there must be some."""

    must: frozenset[str]
    may: frozenset[str] = frozenset()
    windows: bool = False
    point_state: bool = False


INDEX = "idx.k"  # keys of an indexer, one a token
POOLED = "pool.k"  # keys of an indexer, one a block

KINDS: Mapping[str, Kind] = {
    "kv": Kind(frozenset({KEYS}), frozenset({VALUES})),
    "iswa": Kind(frozenset({KEYS}), frozenset({VALUES}), windows=True),
    "dsa": Kind(frozenset({KEYS, INDEX})),
    "dsa_iswa": Kind(frozenset({KEYS, INDEX}), windows=True),
    "dsv4": Kind(
        frozenset({KEYS}), frozenset({SPARSE_KEYS, HEAVY_KEYS, INDEX_KEYS}), windows=True, point_state=True
    ),
    "msa": Kind(frozenset({KEYS, VALUES, INDEX})),
    "recurrent": Kind(frozenset(), point_state=True),
    "hybrid": Kind(frozenset({KEYS}), frozenset({VALUES}), point_state=True),
    "hybrid_iswa": Kind(frozenset({KEYS}), frozenset({VALUES}), windows=True, point_state=True),
    "hybrid_idx": Kind(frozenset({KEYS, POOLED}), frozenset({VALUES}), point_state=True),
}


def build_memory(spec: MemorySpec) -> PartsMemory:
    """An empty memory of the kind that the model needs. Raises ConfigError for a kind that there is not, for
    parts that do not make one of it, or for a dtype that a part cannot be stored as."""
    kind = KINDS.get(spec.needs.kind)
    if kind is None:
        raise ConfigError(f"memory kind {spec.needs.kind!r}: there are {', '.join(KINDS)}")
    _check(spec.needs.kind, kind, spec.needs.parts)
    return PartsMemory(spec, CellTable(spec.num_cells, spec.num_seqs), window_table(spec))


def _check(name: str, kind: Kind, parts: tuple[PartNeed, ...]) -> None:
    keys = [(part.name, part.layer) for part in parts]
    if len(set(keys)) != len(keys):
        raise ConfigError(f"kind {name!r}: two parts of one layer have the same name")
    names = {part.name for part in parts if not isinstance(part, PointSpec)}
    lacking, beyond = kind.must - names, names - kind.must - kind.may
    if lacking:
        raise ConfigError(f"kind {name!r}: there is no part {', '.join(sorted(lacking))}")
    if beyond:
        raise ConfigError(f"kind {name!r}: it has no part {', '.join(sorted(beyond))}")
    has_windows = any(isinstance(part, RowsSpec) and part.window is not None for part in parts)
    if has_windows is not kind.windows:
        raise ConfigError(f"kind {name!r}: {'it has no windows' if has_windows else 'no part has a window'}")
    if any(isinstance(part, PointSpec) for part in parts) is not kind.point_state:
        raise ConfigError(f"kind {name!r}: {'no part' if kind.point_state else 'a part'} has point state")
    valued = {part.layer for part in parts if part.name == VALUES}
    for part in parts:
        alone = isinstance(part, RowsSpec) and part.name == KEYS and part.value_size is None
        if alone and part.layer not in valued:
            raise ConfigError(f"kind {name!r}: keys of layer {part.layer} have no values")
