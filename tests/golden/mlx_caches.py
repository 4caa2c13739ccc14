"""How the files in `mlx-lm` were made: by mlx-lm itself, `python mlx_caches.py FOLDER VERSION NAMES…`.

Run once with each version that is named in them; tests read the files and need no mlx. A row's values are a
function of its layer, position and place, so that a test knows which row it has before it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import mlx.core as mx
from mlx_lm.models import cache as library

HEADS, SIZE = 2, 4


def rows(layer: int, tensor: int, start: int, stop: int, size: int = SIZE) -> mx.array:
    """[1, heads, tokens, size], small whole numbers."""
    t = mx.arange(start, stop).reshape(1, 1, -1, 1)
    h = mx.arange(HEADS).reshape(1, -1, 1, 1)
    d = mx.arange(size).reshape(1, 1, 1, -1)
    return ((7 * t + 31 * h + 3 * d + 11 * layer + 5 * tensor) % 127 - 63).astype(mx.bfloat16)


def feed(cache: object, layer: int, parts: list[int], size: int = SIZE) -> None:
    """Prompts and tokens of the given lengths, one after the other."""
    at = 0
    for count in parts:
        cache.update_and_fetch(rows(layer, 0, at, at + count, size), rows(layer, 1, at, at + count, size))
        at += count


#: What every ring has gone through: slots, kept, lengths of what was fed, how many tokens were taken back.
RINGS = (
    (8, 0, [5], 0),
    (8, 0, [8], 0),
    (8, 0, [20], 0),
    (8, 0, [5, 1, 1], 0),
    (8, 0, [5, 1, 1, 1, 1, 1], 0),
    (8, 0, [20, 1], 0),
    (8, 0, [20, 1, 1, 1], 0),
    (8, 0, [3] + [1] * 21, 0),
    (8, 4, [6, 1], 0),
    (8, 4, [20, 1, 1], 0),
    (8, 4, [4] + [1] * 9, 0),
    (8, 2, [5, 1, 1], 2),
    (8, 0, [6, 3, 1, 5], 0),
    (300, 0, [1] * 260, 0),
)


def plain(folder: Path) -> list[object]:
    """Two layers of plain attention, of which the buffers have more room than rows."""
    caches = [library.KVCache() for _ in range(2)]
    for layer, cache in enumerate(caches):
        feed(cache, layer, [5, 1, 1])
    return caches


def windows(folder: Path) -> list[object]:
    """Full and window layers in turns; the windows of 8 have wrapped."""
    caches = [library.RotatingKVCache(max_size=8), library.KVCache(), library.RotatingKVCache(max_size=8)]
    for layer, cache in enumerate(caches):
        feed(cache, layer, [10, 1, 1, 1])
    return caches


def rings(folder: Path) -> list[object]:
    caches = []
    for layer, (slots, keep, parts, back) in enumerate(RINGS):
        cache = library.RotatingKVCache(max_size=slots, keep=keep)
        feed(cache, layer, parts)
        cache.trim(back)
        caches.append(cache)
    return caches


def chunks(folder: Path) -> list[object]:
    """A chunked layer whose front was cut, and a full one. (0.31.3 fails to grow such a layer.)"""
    caches = [library.ChunkedKVCache(8), library.KVCache()]
    for layer, cache in enumerate(caches):
        feed(cache, layer, [6])
    for start, stop in ((6, 12), (12, 13)):
        caches[0].maybe_trim_front()
        for layer, cache in enumerate(caches):
            cache.update_and_fetch(rows(layer, 0, start, stop), rows(layer, 1, start, stop))
    return caches


def quantized(folder: Path) -> list[object]:
    """8 and 4 bits in groups of 32. What mlx makes of them is beside them."""
    caches = [library.QuantizedKVCache(32, 8), library.QuantizedKVCache(32, 4)]
    for layer, cache in enumerate(caches):
        feed(cache, layer, [5, 1], 32)
    plain = {}
    for layer, cache in enumerate(caches):
        for name, held in (("keys", cache.keys), ("values", cache.values)):
            values = mx.dequantize(*held, group_size=32, bits=cache.bits)
            plain[f"{layer}.{name}"] = values[..., :6, :]
    mx.save_safetensors(str(folder / "dequantized.safetensors"), plain)
    return caches


def hybrid(folder: Path) -> list[object]:
    """Layers with both, one with recurrent state alone, one with attention alone."""
    caches = []
    for layer in range(3):
        arrays = library.ArraysCache(2)
        arrays[0] = rows(layer, 2, 0, 3, 6)[:, 0]
        arrays[1] = rows(layer, 3, 0, 4, 5).astype(mx.float32)
        attention = library.KVCache()
        feed(attention, layer, [4, 1])
        caches.append((library.CacheList(arrays, attention), arrays, attention)[layer])
    return caches


MAKERS = (plain, windows, rings, chunks, quantized, hybrid)


def main() -> None:
    folder, version, names = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    for maker in [maker for maker in MAKERS if maker.__name__ in names]:
        caches = maker(folder)
        said = {"model": "tiny", "tokens": json.dumps(list(range(100, 107)))} if maker is plain else {}
        library.save_prompt_cache(str(folder / f"{maker.__name__}-{version}.safetensors"), caches, said)


if __name__ == "__main__":
    main()
