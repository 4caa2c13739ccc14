"""What a llama.cpp file says takes no more memory than four files, whatever it says."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest

from engine.errors import StateError
from serialization.foreign.detect import read_llama
from serialization.foreign.geometry import CacheRole, CellExtension, Geometry
from tests.golden.llama import (
    Kv,
    name_of,
    owned,
    packed,
    sequence_file,
    session_file,
)
from tests.serialization.foreign.geometries import rows

#: wide enough that a file of few cells is large
WIDE = Geometry("llama", 100, 1, (rows(CacheRole.FULL, 0, keys=4096, values=4096),))
#: as narrow as can be: a file of many cells has nothing else
THIN = Geometry("llama", 100, 1, (rows(CacheRole.FULL, 0, keys=1, values=None),))
PLACED = replace(THIN, extension=CellExtension.POSITION_2D)
ROWS = Kv((0,), (owned(range(40), 0),), keys=("f16", 4096), values=("f16", 4096))
LLAMA = name_of("llama")


def of_cells(counts: list[int]) -> bytes:
    """A session of cells that have so many owners each, and of rows of two bytes."""
    cells = tuple((at, tuple(range(count)), ()) for at, count in enumerate(counts))
    return session_file(10, (), LLAMA, Kv((0,), (cells,), keys=("f16", 1), values=None))


def files() -> Iterator[tuple[str, Geometry, bytes]]:
    ids = [11] * 200_000
    yield "many rows", WIDE, sequence_file(3, (1,), ROWS)
    yield "many transposed rows", WIDE, sequence_file(3, (1,), replace(ROWS, transposed=True))
    yield "many rows of a session", WIDE, session_file(10, (1,), LLAMA, ROWS)
    yield "more tokens than rows", WIDE, sequence_file(3, ids, ROWS)
    yield "more packed tokens than rows", WIDE, sequence_file(3, packed(ids), ROWS)
    yield "many cells", THIN, of_cells([1] * 2_000)
    yield "cells of one owner, and one of two", THIN, of_cells([1] * 2_000 + [2])
    yield "cells of one and two owners", THIN, of_cells([1, 2] * 1_000)
    yield "cells of many owners", THIN, of_cells([256] * 500)
    placed = tuple((at, (0,) if at else (0, 1), (at, at, 7)) for at in range(2_000))
    kv = Kv((0,), (placed,), keys=("f16", 1), values=None)
    yield "cells with places", PLACED, session_file(10, (), LLAMA, kv)
    yield "cells of many owners, and one of one", THIN, of_cells([256] * 500 + [1])


FILES = {name: (geometry, data) for name, geometry, data in files()}


def taken(geometry: Geometry, data: bytes) -> int:
    """Bytes allocated at once, at most, to read a file or to refuse it."""
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    with suppress(StateError):
        read_llama(data, geometry, 0)
    return tracemalloc.get_traced_memory()[1] - before


def fits(geometry: Geometry, data: bytes) -> bool:
    """Whether reading takes no more than four files once in three times: what threads of other tests allocate
    meanwhile is counted, too."""
    return any(taken(geometry, data) <= 4 * len(data) for _ in range(3))


@pytest.mark.parametrize("name", FILES)
def test_no_number_in_a_large_file_takes_more_than_four_times_its_size(name: str) -> None:
    geometry, data = FILES[name]
    places = [*range(8, 100, 4), len(data) - 8, len(data) - 4]
    taken(geometry, data)  # what is imported and cached is not the file's
    tracemalloc.start()
    try:
        assert fits(geometry, data)
        for at in places:
            for value in (0xFFFFFFFF, len(data)):
                changed = data[:at] + struct.pack("<I", value) + data[at + 4 :]
                assert fits(geometry, changed)
    finally:
        tracemalloc.stop()
