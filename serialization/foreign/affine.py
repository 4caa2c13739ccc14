"""Rows that mlx quantized in groups: value = scale * q + bias, a scale and a bias for every group of a head.

Dequantized they are what `mlx.core.dequantize` makes of them, bit for bit: every step is rounded to the dtype
of the scales.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from engine.errors import Corrupt, UnknownFeature
from serialization.foreign.held import Floats
from serialization.foreign.tensor_file import Array

#: Bits of a value, and the bytes of a plain dtype that it may become: no more than four times what is stored.
_READ: Mapping[int, tuple[str, ...]] = {4: ("bf16", "f16"), 8: ("bf16", "f16", "f32")}

_WORD_BITS = 32
_GROUPS = (32, 64, 128)


def dequantized(packed: Array, scales: Floats, biases: Floats, bits: int, group: int) -> Floats:
    """Values [..., size] in the dtype of the scales, of `packed` uint32 [..., size * bits / 32], the first in
    the lowest bits, with `scales` and `biases` [..., size / group].

    Raises UnknownFeature for other bits or groups than are read, Corrupt where the three do not fit together.
    """
    if bits not in _READ or group not in _GROUPS or scales.dtype not in _READ[bits]:
        raise UnknownFeature(
            f"a cache quantized to {bits} bits in groups of {group} with {scales.dtype} scales is not read:"
            " dequantize it in mlx (mlx.core.dequantize) into a KVCache and save that"
        )
    *outer, words = packed.shape
    size = words * _WORD_BITS // bits
    expected = (*outer, size // group)
    if packed.dtype != np.uint32 or size % group or scales.dtype != biases.dtype:
        raise Corrupt(
            "a quantized cache: packed values, scales and biases are of dtypes or sizes that do not fit"
        )
    if scales.values.shape != expected or biases.values.shape != expected:
        raise Corrupt(
            f"a quantized cache: scales of shape {expected} are expected, not {scales.values.shape}"
        )
    # By row, so that no more is held in float32 than one head of one layer.
    values = np.empty((*outer, size), _STORED[scales.dtype])
    for at in np.ndindex(*outer[:-1]):
        values[at] = _head(packed[at], scales.values[at], biases.values[at], scales.dtype, bits, group)
    return Floats(scales.dtype, values)


_STORED: Mapping[str, type[np.generic]] = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}

#: Rows that are worked on at once.
_STEP = 256


def _head(packed: Array, scales: Array, biases: Array, dtype: str, bits: int, group: int) -> Array:
    """[rows, size] of one head."""
    rows, words = packed.shape
    values = np.empty((rows, words * _WORD_BITS // bits), _STORED[dtype])
    shifts = np.arange(0, _WORD_BITS, bits, dtype=np.uint32)
    for start in range(0, rows, _STEP):
        some = slice(start, start + _STEP)
        levels = (packed[some][..., None] >> shifts) & np.uint32(2**bits - 1)
        wide = levels.astype(np.float32).reshape(len(levels), -1, group)
        scaled = _narrow(_wide(scales[some], dtype)[..., None] * wide, dtype)
        shifted = _narrow(_wide(scaled, dtype) + _wide(biases[some], dtype)[..., None], dtype)
        values[some] = shifted.reshape(len(levels), -1)
    return values


def _wide(values: Array, dtype: str) -> Array:
    """As float32."""
    if dtype == "bf16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def _narrow(values: Array, dtype: str) -> Array:
    """From float32, to the nearest, ties to even; bfloat16 as its bits."""
    if dtype == "bf16":
        bits = values.view(np.uint32)
        rounded = ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
        return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
    with np.errstate(over="ignore"):
        return values.astype(_STORED[dtype])
