"""Caches of mlx-lm for tests: what it wrote, the geometries of the models, and others written here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from serialization.foreign.geometry import (
    CacheRole,
    Geometry,
    LayerRows,
    RecurrentCache,
    RowsCache,
    StateLayer,
    Window,
)
from serialization.foreign.tensor_file import Array, write_tensor_file

GOLDEN = Path(__file__).parents[2] / "golden" / "mlx-lm"
HEADS, SIZE = 2, 4


def golden(name: str) -> memoryview:
    return memoryview((GOLDEN / f"{name}.safetensors").read_bytes())


def shape(layer: int, size: int = SIZE, n_rot: int = 0) -> LayerRows:
    return LayerRows(layer, HEADS, size, size, n_rot)


def geometry(*caches: RowsCache | RecurrentCache, layers: int, architecture: str = "tiny") -> Geometry:
    return Geometry(architecture, 1000, layers, caches)


PLAIN = geometry(RowsCache(CacheRole.FULL, (shape(0), shape(1))), layers=2)


WINDOWS = geometry(
    RowsCache(CacheRole.FULL, (shape(1),)),
    RowsCache(CacheRole.WINDOW, (shape(0), shape(2)), Window(8)),
    layers=3,
)


CHUNKED = geometry(
    RowsCache(CacheRole.FULL, (shape(1),)),
    RowsCache(CacheRole.WINDOW, (shape(0),), Window(8, chunked=True)),
    layers=2,
)


QUANTIZED = geometry(RowsCache(CacheRole.FULL, (shape(0, 32), shape(1, 32))), layers=2)


HYBRID = geometry(
    RowsCache(CacheRole.FULL, (shape(0), shape(2))),
    RecurrentCache(3, (StateLayer(0, 18, 40), StateLayer(1, 18, 40))),
    layers=3,
)


def written(arrays: Mapping[str, Array], said: Mapping[str, str]) -> memoryview:
    names = {"float16": "F16", "float32": "F32", "int32": "I32", "uint32": "U32", "float64": "F64"}
    tensors = {name: (names[array.dtype.name], array) for name, array in arrays.items()}
    return memoryview(b"".join(write_tensor_file(tensors, said)))


def kv(count: int = 3, heads: int = HEADS, size: int = SIZE, dtype: str = "float16") -> Array:
    return np.arange(heads * count * size).reshape(1, heads, count, size).astype(dtype)


ONE = geometry(RowsCache(CacheRole.FULL, (shape(0),)), layers=1)


def meta(name: str, *numbers: str, **arrays: Any) -> memoryview:
    """A file of the older layout with one cache."""
    said = {f"0.0.{at}": number for at, number in enumerate(numbers)} or {"0.0": ""}
    return written({f"0.{place[1:]}": array for place, array in arrays.items()}, {**said, "2.0": name})


def pairs(**changes: str) -> dict[str, str]:
    return {"model": "tiny", "tokenizer_config": "{}", "chat_template": "", "max_kv_size": "None", **changes}


def scalars(classes: tuple[str, ...], stands: Mapping[str, str], **arrays: Any) -> memoryview:
    """A file of the newer layout: `stands` says what of which tensor, and `_0_1` is tensor 0.1."""
    said = {f"1.{at}": name for at, name in enumerate(classes)} | {"2.0": ""}
    for at, (name, kind) in enumerate(stands.items(), 1):
        said |= {f"2.{at}.0": name, f"2.{at}.1": kind}
    return written({name[1:].replace("_", "."): array for name, array in arrays.items()}, said)


def number(value: Any, dtype: str = "int32") -> Array:
    return np.array(value, dtype)


def letters(text: str) -> Array:
    return np.array([ord(char) for char in text], "int32")


PAIR: dict[str, Any] = {"_0_0": kv(), "_0_1": kv()}
LISTED: dict[str, Any] = {"_0_0_0_0": kv(), "_0_0_0_1": kv()}
KIND = {"0.0.1": "string"}
