"""GGML's tensor types: their numbers, the bytes of a block, and which of them our rows can have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.errors import Unsupported
from engine.state import DTYPES


@dataclass(frozen=True, slots=True)
class GgmlType:
    """A block of `block_values` values is `block_nbytes` bytes."""

    number: int
    name: str
    block_nbytes: int
    block_values: int

    @property
    def convertible(self) -> bool:
        """Whether it is a dtype of our rows."""
        return self.name in DTYPES

    @property
    def plain(self) -> bool:
        """Whether every value has bytes of its own."""
        return self.block_values == 1

    def row_nbytes(self, values: int) -> int | None:
        """Bytes of a row of so many values; None where blocks do not divide it."""
        blocks, rest = divmod(values, self.block_values)
        return None if rest else blocks * self.block_nbytes


#: Those that llama.cpp lets a cache have. ggml.h numbers them; blocks are as in ggml-common.h.
TYPES: tuple[GgmlType, ...] = (
    GgmlType(0, "f32", 4, 1),
    GgmlType(1, "f16", 2, 1),
    GgmlType(2, "q4_0", 18, 32),
    GgmlType(3, "q4_1", 20, 32),
    GgmlType(6, "q5_0", 22, 32),
    GgmlType(7, "q5_1", 24, 32),
    GgmlType(8, "q8_0", 34, 32),
    GgmlType(20, "iq4_nl", 18, 32),
    GgmlType(30, "bf16", 2, 1),
)
BY_NUMBER: Mapping[int, GgmlType] = {each.number: each for each in TYPES}
BY_NAME: Mapping[str, GgmlType] = {each.name: each for each in TYPES}


def type_of(dtype: str) -> GgmlType:
    """The type of a dtype of our rows. Raises `Unsupported` where GGML's caches have none."""
    try:
        return BY_NAME[dtype]
    except KeyError:
        raise Unsupported(f"llama.cpp caches have no rows of {dtype}", dtype=dtype) from None
