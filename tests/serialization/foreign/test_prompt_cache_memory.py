"""A prompt cache takes no more memory to read than four times its size, beside the file itself."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from serialization.foreign.foreign_state import ForeignState
from serialization.foreign.geometry import CacheRole, Geometry, LayerRows, RowsCache, Window
from serialization.foreign.mlx import read_mlx
from serialization.foreign.tensor_file import Array
from serialization.foreign.torch_dump import read_torch_dump
from tests.serialization.foreign.mlx_files import written
from tests.serialization.foreign.test_torch_dump import SAID
from tests.serialization.foreign.test_torch_dump import written as dumped

HEADS, SIZE, TOKENS = 4, 128, 4000
SHAPE = LayerRows(0, HEADS, SIZE, SIZE, SIZE)
FULL = Geometry("tiny", 100, 1, (RowsCache(CacheRole.FULL, (SHAPE,)),))
TURNED = Geometry("cohere2", 100, 1, FULL.caches)
RING = Geometry("tiny", 100, 1, (RowsCache(CacheRole.WINDOW, (SHAPE,), Window(TOKENS)),))


def values(dtype: str = "float16") -> Array:
    return np.ones((1, HEADS, TOKENS, SIZE), dtype)


def quantized(bits: int, group: int, dtype: str) -> memoryview:
    """Keys and values packed in groups: with the widest groups the file is smallest."""
    packed = np.ones((1, HEADS, TOKENS, SIZE * bits // 32), "uint32")
    scales = np.ones((1, HEADS, TOKENS, SIZE // group), dtype)
    arrays = {f"0.{at}.{part}": each for at in (0, 1) for part, each in enumerate((packed, scales, scales))}
    numbers = {f"0.0.{at}": str(number) for at, number in enumerate((TOKENS, group, bits))}
    return written(arrays, {**numbers, "2.0": "QuantizedKVCache"})


def ring() -> memoryview:
    """One that wrapped in the middle."""
    numbers = {f"0.0.{at}": str(number) for at, number in enumerate((0, TOKENS, 5000, TOKENS // 2))}
    return written({"0.0": values(), "0.1": values()}, {**numbers, "2.0": "RotatingKVCache"})


FILES: dict[str, Callable[[], tuple[memoryview, Callable[[memoryview], ForeignState]]]] = {
    "4 bits": lambda: (quantized(4, 128, "float16"), lambda data: read_mlx(data, FULL)),
    "8 bits": lambda: (quantized(8, 128, "float32"), lambda data: read_mlx(data, FULL)),
    "in other pairs": lambda: (quantized(4, 128, "float16"), lambda data: read_mlx(data, TURNED)),
    "a ring": lambda: (ring(), lambda data: read_mlx(data, RING)),
    "a dump": lambda: (
        dumped({**SAID, "length": str(TOKENS)}, _0_keys=values("float32"), _0_values=values("float32")),
        lambda data: read_torch_dump(data, TURNED),
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_large_file_takes_four_times_its_size_at_most(name: str) -> None:
    data, read = FILES[name]()
    assert len(data) > 2**21
    tracemalloc.start()
    try:
        state = read(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(state.caches[0].positions) == TOKENS
    assert peak < 4 * len(data) + 2**19
