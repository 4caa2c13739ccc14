"""What a foreign file does not say, and its reader must know: the shape of the model's memory.

A llama.cpp state names no model, no head count and no window; whether cells carry more than a position
cannot be seen in its bytes. So the caller brings the geometry of the model that he names, and a layout is
accepted only where it consumes the file exactly under that geometry.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class CacheRole(StrEnum):
    """Which rows a cache holds."""

    FULL = "full"  # every token
    WINDOW = "window"  # the last ones of a sliding window
    INDEX = "index"  # keys of an indexer that picks tokens


class CellExtension(StrEnum):
    """What a cell says beside its position and its owners."""

    NONE = "none"
    POSITION_2D = "position-2d"  # M-RoPE: x and y (8 bytes); with the token id from layout 3 on (12)
    TOKEN = "token"  # PLE: from layout 3 on the same 12 bytes, and nothing before


class Pairing(StrEnum):
    """Which values of a head RoPE turns together in a foreign row: i with i + n/2 in ours, always."""

    HALVES = "halves"  # i and i + n/2
    INTERLEAVED = "interleaved"  # 2i and 2i + 1


@dataclass(frozen=True, slots=True)
class LayerRows:
    """K and V of one layer: `kv_heads` heads of `key_size` and `value_size` values. A `value_size` of None:
    the layer has no V of its own (latents). RoPE turned `n_rot` values of every key head from `rot_start` on
    (0: none)."""

    layer: int
    kv_heads: int
    key_size: int
    value_size: int | None
    n_rot: int = 0
    rot_start: int = 0

    @property
    def key_values(self) -> int:
        """Values of one row of keys."""
        return self.kv_heads * self.key_size

    @property
    def value_values(self) -> int:
        """Values of one row of values; 0 where there is none."""
        return self.kv_heads * (self.value_size or 0)


@dataclass(frozen=True, slots=True)
class Window:
    """See `engine.cache.memory.WindowSpec`."""

    size: int
    chunked: bool = False


@dataclass(frozen=True, slots=True)
class RowsCache:
    """One KV cache: its layers, rising. `window` for the role of that name alone."""

    role: CacheRole
    layers: tuple[LayerRows, ...]
    window: Window | None = None


@dataclass(frozen=True, slots=True)
class StateLayer:
    """Recurrent state of one layer: `conv_values` of the convolution (R) and `state_values` (S)."""

    layer: int
    conv_values: int
    state_values: int


@dataclass(frozen=True, slots=True)
class RecurrentCache:
    """Point state of a model of `num_layers` layers, of which `layers` have any."""

    num_layers: int
    layers: tuple[StateLayer, ...]


Cache = RowsCache | RecurrentCache


@dataclass(frozen=True, slots=True)
class Geometry:
    """`caches` are in the order in which a file has them: full before window, rows before recurrent state,
    an indexer's last (but before a window's). A model whose full and window layers another system kept in
    one cache is read by `merged`. `architecture` is GGUF's name of it."""

    architecture: str
    vocab_size: int
    num_layers: int
    caches: tuple[Cache, ...]
    extension: CellExtension = CellExtension.NONE
    pairing: Pairing = Pairing.HALVES

    def merged(self) -> Geometry:
        """With full and window layers in one full cache, as llama.cpp wrote them before mid-2025."""
        rows = [
            cache
            for cache in self.caches
            if isinstance(cache, RowsCache) and cache.role is not CacheRole.INDEX
        ]
        if len(rows) < 2:
            return self
        layers = sorted((layer for cache in rows for layer in cache.layers), key=lambda each: each.layer)
        one = RowsCache(CacheRole.FULL, tuple(layers))
        return Geometry(
            self.architecture,
            self.vocab_size,
            self.num_layers,
            (one, *(cache for cache in self.caches if cache not in rows)),
            self.extension,
            self.pairing,
        )
