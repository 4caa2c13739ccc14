"""States that llama.cpp really wrote, of three of its versions: read whole, and written again bit for bit."""

from __future__ import annotations

import json
import mmap

import pytest
import torch

from serialization.foreign.containers import write_container, write_sequence_file
from serialization.foreign.detect import read_llama, sequences, sniff
from serialization.foreign.geometry import Geometry
from tests.llama_states import NAMES, llama_state
from tests.serialization.foreign.geometries import GEMMA3, SMOLLM2

LAYOUTS = {
    "gemma3-f16-iswa": "3",
    "old-0.3.16-smollm2-fa_off": "2c",
    "old-0.3.16-smollm2-session": "9b",
    "old-0.3.8-smollm2-fa_on": "2a",
    "old-0.3.8-smollm2-session": "9a",
    "smollm2-f16-fa_off": "3",
    "smollm2-f16-fa_on": "3",
    "smollm2-q8_0": "3",
}


def geometry_of(name: str) -> Geometry:
    return GEMMA3 if "gemma3" in name else SMOLLM2


@pytest.mark.parametrize("name", NAMES)
def test_a_real_state_is_read_as_what_it_is_and_written_as_it_was(name: str) -> None:
    path, geometry = llama_state(name), geometry_of(name)
    said = json.loads(path.with_suffix(".json").read_text())
    data = path.read_bytes()
    state = read_llama(data, geometry)
    assert sniff(data[:8])
    assert sequences(data, geometry) == (0,)
    assert (state.layout, state.tokens, state.length) == (
        LAYOUTS[name],
        tuple(said["tokens"]),
        len(said["tokens"]),
    )
    for cells in state.caches:
        assert {rows.dtype for rows in cells.rows} == {said["type_k"]}
        assert cells.transposed == (not said["flash_attn"])
    assert b"".join(write_container(state, geometry)) == data


@pytest.mark.parametrize("name", NAMES)
def test_written_as_files_of_today_real_states_mean_the_same(name: str) -> None:
    geometry = geometry_of(name)
    state = read_llama(llama_state(name).read_bytes(), geometry)
    again = read_llama(b"".join(write_sequence_file(state, geometry)), geometry)
    assert (again.layout, again.tokens) == ("3", state.tokens)
    for mine, other in zip(state.caches, again.caches, strict=True):
        assert (mine.positions == other.positions).all()
        assert all(torch.equal(a.data, b.data) for a, b in zip(mine.rows, other.rows, strict=True))


def test_rows_of_a_mapped_file_are_views_of_it() -> None:
    path = llama_state("smollm2-f16-fa_on")
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    first = read_llama(mapped, SMOLLM2).caches[0].rows[0].data
    where = path.read_bytes().find(first.numpy().tobytes())
    mapped[where] ^= 0xFF  # a private copy: the file stays
    assert int(first[0, 0]) == mapped[where]
