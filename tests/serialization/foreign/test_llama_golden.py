"""One small file of every llama.cpp layout, container and kind of memory: written once, read for ever."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from blake3 import blake3

from engine.errors import UsageError
from serialization.foreign.containers import write_container, write_sequence_file
from serialization.foreign.detect import read_files, read_llama, sequences
from serialization.foreign.files import write_file
from serialization.foreign.foreign_state import ForeignRows, ForeignState
from serialization.foreign.geometry import Geometry, RecurrentCache
from tests.golden.llama import FOLDER, Kv, Made, Recurrent, goldens, row, row_nbytes
from tests.serialization.foreign.geometries import GEOMETRIES

MADE = goldens()
NAMES = sorted(MADE)


def golden(name: str) -> bytes:
    return (FOLDER / f"{name}.bin").read_bytes()


def geometry_of(name: str) -> Geometry:
    return GEOMETRIES[name.split(".")[0]]


def layout_of(name: str) -> str:
    return name.split(".")[1].split("-")[0]


def owners_in(made: Made) -> set[int]:
    """Every sequence that cells name; 0 where they name none."""
    found: set[int] = set()
    for part in made.parts:
        streams = part.cells if isinstance(part, Kv) else ([(at, who, ()) for at, who in part.cells],)
        found |= {each for cells in streams for _, who, _ in cells for each in who}
    return found or {0}


def expect_rows(found: tuple[ForeignRows, ...], widths: dict[str, tuple[str, int]], cells: list[int]) -> None:
    for rows in found:
        dtype, values = widths[rows.tensor]
        nbytes = row_nbytes(dtype, values)
        expected = b"".join(row(rows.layer, rows.tensor, cell, nbytes) for cell in cells)
        assert (rows.dtype, tuple(rows.data.shape)) == (dtype, (len(cells), nbytes))
        assert rows.data.is_contiguous()
        assert rows.data.numpy().tobytes() == expected


def expect(state: ForeignState, made: Made, geometry: Geometry, sequence: int) -> None:
    """The state is that of this sequence, by the file's own making."""
    kvs = [part for part in made.parts if isinstance(part, Kv)]
    recurrent = [part for part in made.parts if isinstance(part, Recurrent)]
    wanted = [cache for cache in geometry.caches if not isinstance(cache, RecurrentCache)]
    assert [cells.role for cells in state.caches] == [cache.role for cache in wanted]
    for cells, cache, kv in zip(
        state.caches, wanted, kvs * (len(wanted) if len(kvs) == 1 else 1), strict=True
    ):
        mine = [
            (index, at, words)
            for stream in kv.cells
            for index, (at, who, words) in enumerate(stream)
            if sequence in who or not who
        ]
        assert cells.positions.tolist() == [at for _, at, _ in mine]
        assert cells.positions.dtype == np.int64
        assert cells.transposed == kv.transposed
        if mine[0][2]:
            assert cells.extension is not None
            assert cells.extension.tolist() == [list(words) for _, _, words in mine]
        else:
            assert cells.extension is None
        widths = {"k": kv.keys, "v": kv.values or ("f16", 0)}
        layers = [each.layer for each in cache.layers]
        assert [each.layer for each in cells.rows] == (layers * 2 if kv.values else layers)
        expect_rows(cells.rows, widths, [index for index, _, _ in mine])
    assert (state.point is None) == (not recurrent)
    if state.point is not None:
        part = recurrent[0]
        [(index, at)] = [
            (index, at) for index, (at, who) in enumerate(part.cells) if sequence in who or not who
        ]
        assert state.point.position == at
        expect_rows(state.point.rows, {"r": ("f32", part.conv), "s": ("f32", part.state)}, [index])


def test_golden_files_are_those_of_the_index_and_never_change() -> None:
    index = json.loads((FOLDER / "index.json").read_text())
    assert {path.name for path in FOLDER.iterdir()} == {*index, "index.json"}
    assert set(index) == {f"{name}.bin" for name in NAMES}
    for name, digest in index.items():
        assert blake3((FOLDER / name).read_bytes()).hexdigest() == digest


@pytest.mark.parametrize("name", NAMES)
def test_every_sequence_of_a_golden_file_is_what_the_file_was_made_of(name: str) -> None:
    data, geometry, made = golden(name), geometry_of(name), MADE[name]
    assert data == made.data
    owners = owners_in(made) if ".prefixed" not in name else {data[4]}
    assert sequences(data, geometry) == tuple(sorted(owners))
    for sequence in owners:
        state = read_llama(data, geometry, sequence)
        assert state.tokens == made.ids
        expect(state, made, geometry, sequence)
        ends = [int(cells.positions.max()) for cells in state.caches]
        assert state.length == 1 + max([*ends, *([state.point.position] if state.point else [])])
    with pytest.raises(UsageError, match="holds no sequence 99"):
        read_llama(data, geometry, 99)


@pytest.mark.parametrize("name", NAMES)
def test_the_layout_is_found_whatever_else_has_its_version(name: str) -> None:
    state = read_llama(golden(name), geometry_of(name), min(sequences(golden(name), geometry_of(name))))
    layout = layout_of(name)
    if layout in ("bare", "context", "prefixed"):  # without a version: the oldest that writes such bytes
        layout = {
            "plain.bare-2a": "2a",
            "plain.bare-2b": "2b",
            "plain.bare-2c": "2c",
            "plain.context-9b": "9b",
            "plain.context-10": "9c",
            "pictures.prefixed-3": "3",
        }.get(name, "2d")
    assert state.layout == ("2c" if name == "tokens.2d" else layout)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_read_is_written_bit_for_bit(name: str) -> None:
    data, geometry = golden(name), geometry_of(name)
    for file in read_files(data, geometry):
        assert b"".join(write_file(file, geometry)) == data
    found = sequences(data, geometry)
    if len(found) == 1:
        assert b"".join(write_container(read_llama(data, geometry), geometry)) == data


@pytest.mark.parametrize("name", [name for name in NAMES if name != "tokens.2d"])
def test_every_sequence_goes_into_a_file_of_today(name: str) -> None:
    data, geometry = golden(name), geometry_of(name)
    for sequence in sequences(data, geometry):
        state = read_llama(data, geometry, sequence)
        again = read_llama(b"".join(write_sequence_file(state, geometry)), geometry)
        assert (again.layout, again.tokens) == ("3", state.tokens or ())
        for mine, other in zip(state.caches, again.caches, strict=True):
            assert np.array_equal(mine.positions, other.positions)
            assert all(torch.equal(a.data, b.data) for a, b in zip(mine.rows, other.rows, strict=True))
        if state.point is not None:
            assert again.point is not None
            assert again.point.position == state.point.position
