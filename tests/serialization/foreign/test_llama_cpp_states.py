"""Whatever llama.cpp writes in any setting is read, and written again bit for bit. `make llama` runs this.

Types of rows, flash attention on and off, one stream and three, copied sequences, holes; files and states
from memory; plain, sliding, recurrent and hybrid memories, and cells with places.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from serialization.foreign.containers import write_container
from serialization.foreign.detect import read_files, read_llama, sequences
from serialization.foreign.files import write_file
from serialization.foreign.geometry import Geometry
from tests.conftest import fetched
from tests.serialization.foreign.geometries import GEMMA3, SMOLLM2
from tests.serialization.foreign.tiny_memories import TINY
from tests.sessions.migrate.llama_python import llama_python

pytestmark = [pytest.mark.real, pytest.mark.slow]

SCRIPT = Path(__file__).with_name("written_by_llama_cpp.py")
REAL = {"smollm2": SMOLLM2, "gemma3-270m": GEMMA3}


def written(model: Path, folder: Path, types: str) -> dict[str, dict[int, list[int]]]:
    """The states that llama.cpp made of a model, and what each sequence of them was fed."""
    command = [llama_python(), SCRIPT, model, folder, types]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    said = [json.loads(line) for line in result.stdout.splitlines()]
    return {each["name"]: {int(id_): fed for id_, fed in each["fed"].items()} for each in said}


def expect(data: bytes, geometry: Geometry, fed: dict[int, list[int]]) -> None:
    for file in read_files(data, geometry):
        assert b"".join(write_file(file, geometry)) == data
    found = sequences(data, geometry)
    if found == (0,) and len(fed) == 1:  # a recurrent state in a file says no id
        fed = {0: next(iter(fed.values()))}
    assert found == tuple(sorted(fed))
    for sequence, (count, forgotten) in fed.items():
        state = read_llama(data, geometry, sequence)
        assert state.length == count
        assert all(len(cells.positions) == count - forgotten for cells in state.caches)
        if len(fed) == 1:
            assert b"".join(write_container(state, geometry)) == data


@pytest.mark.parametrize("name", [*REAL, *TINY])
def test_what_llama_cpp_writes_is_read_and_written_bit_for_bit(name: str, tmp_path: Path) -> None:
    if name in REAL:
        geometry, model = REAL[name], fetched(name)
    else:
        geometry, write = TINY[name]
        model = write(tmp_path / "model.gguf")
    states = written(model, tmp_path, "every" if name in REAL else "one")
    for each, fed in states.items():
        expect((tmp_path / each).read_bytes(), geometry, fed)
        (tmp_path / each).unlink()
    print(json.dumps({"model": name, "states": len(states), "read": "and written again bit for bit"}))
