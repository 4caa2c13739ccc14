"""Rows that mlx quantized in groups: value = scale * q + bias, a scale and a bias for every group of a head.

Dequantized they are what `mlx.core.dequantize` makes of them, bit for bit: every step is rounded to the dtype
of the scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from engine.errors import Corrupt, UnknownFeature
from serialization.foreign.held import Floats
from serialization.foreign.tensor_file import Array

#: Bits of a value, and the bytes of a plain dtype that it may become: no more than four times what is stored.
_READ: Mapping[int, tuple[str, ...]] = {4: ("bf16", "f16"), 8: ("bf16", "f16", "f32")}

_WORD_BITS = 32
_GROUPS = (32, 64, 128)


@dataclass(frozen=True, slots=True)
class Packed:
    """Keys or values [heads, slots, size] in the dtype of the scales. `packed`: uint32 [heads, slots, words],
    the first value in the lowest bits. `scales`, `biases`: [heads, slots, size / group].

    Raises UnknownFeature for other bits or groups than are read, Corrupt where the three do not fit together.
    """

    packed: Array
    scales: Floats
    biases: Floats
    bits: int
    group: int

    def __post_init__(self) -> None:
        if self.bits not in _READ or self.group not in _GROUPS or self.dtype not in _READ[self.bits]:
            raise UnknownFeature(
                f"a cache quantized to {self.bits} bits in groups of {self.group} with {self.dtype} scales is"
                " not read: dequantize it in mlx (mlx.core.dequantize) into a KVCache and save that"
            )
        heads, slots, size = self.shape
        if self.packed.dtype != np.uint32 or size % self.group or self.biases.dtype != self.dtype:
            raise Corrupt("a quantized cache: packed values, scales and biases do not fit together")
        if not self.scales.shape == self.biases.shape == (heads, slots, size // self.group):
            raise Corrupt(f"a quantized cache: {size} values in groups of {self.group} have other scales")

    @property
    def dtype(self) -> str:
        return self.scales.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        heads, slots, words = self.packed.shape
        return heads, slots, words * _WORD_BITS // self.bits

    def rows(self, start: int, stop: int) -> Array:
        heads, _, size = self.shape
        values = np.empty((stop - start, heads, size), _STORED[self.dtype])
        with np.errstate(over="ignore", invalid="ignore"):  # a scale may be any number, and none
            for head in range(heads):
                values[:, head] = self._head(head, slice(start, stop))
        return values

    def _head(self, head: int, slots: slice) -> Array:
        """[slots, size] of one head."""
        shifts = np.arange(0, _WORD_BITS, self.bits, dtype=np.uint32)
        levels = (self.packed[head, slots, :, None] >> shifts) & np.uint32(2**self.bits - 1)
        wide = levels.reshape(len(levels), -1, self.group).astype(np.float32)
        scales, biases = (
            _wide(each.values[head, slots, :, None], self.dtype) for each in (self.scales, self.biases)
        )
        scaled = _wide(_narrow(scales * wide, self.dtype), self.dtype)
        return _narrow(scaled + biases, self.dtype).reshape(len(levels), -1)


_STORED: Mapping[str, type[np.generic]] = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}


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
    return values.astype(_STORED[dtype])
