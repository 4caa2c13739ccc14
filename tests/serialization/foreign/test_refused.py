"""Pickles and their folders are told by their first bytes, never loaded, and the way out is said."""

from __future__ import annotations

import pickle
import sqlite3
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from engine.errors import UnknownFormat
from serialization.foreign.readers import kind_of, read_foreign
from tests.serialization.foreign.geometries import GEOMETRIES

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


class Bomb:
    """Loading it would end the test."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("a pickle was loaded",))


def refusal(path: Path) -> str:
    """What is said of a file, by both who ask for its kind and who ask for its state."""
    with pytest.raises(UnknownFormat) as asked:
        kind_of(path)
    with pytest.raises(UnknownFormat) as read:
        read_foreign(path, GEOMETRIES["plain"])
    assert str(asked.value) == str(read.value)
    assert asked.value.exit_code == 39
    assert "\n" not in str(asked.value)
    return str(asked.value)


@pytest.fixture
def llama_state(monkeypatch: pytest.MonkeyPatch) -> type:
    """A class that pickles as llama-cpp-python's does."""
    module = types.ModuleType("llama_cpp.llama")
    found = type("LlamaState", (), {"__module__": "llama_cpp.llama"})
    monkeypatch.setattr(module, "LlamaState", found, raising=False)
    monkeypatch.setitem(sys.modules, "llama_cpp", types.ModuleType("llama_cpp"))
    monkeypatch.setitem(sys.modules, "llama_cpp.llama", module)
    return found


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_pickled_llama_state_is_sent_back_to_llama_cpp(
    protocol: int, llama_state: type, tmp_path: Path
) -> None:
    state = llama_state()
    state.llama_state, state.bomb = b"x" * 100, Bomb()
    path = tmp_path / "state.pkl"
    path.write_bytes(pickle.dumps(state, protocol))
    said = refusal(path)
    assert "a pickled state of llama-cpp-python, which is never loaded here" in said
    assert "llama_cpp.llama_state_seq_save_file" in said


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("kind", ["object", "list", "dict"])
def test_a_pickle_is_never_loaded(protocol: int, kind: str, tmp_path: Path) -> None:
    value: object = {"object": Bomb(), "list": [Bomb()], "dict": {"a": Bomb()}}[kind]
    path = tmp_path / "tea.bin"
    path.write_bytes(pickle.dumps(value, protocol))
    assert "a pickle, which is never loaded here" in refusal(path)


@pytest.mark.parametrize("zipped", [True, False])
def test_what_torch_saved_is_sent_to_the_function_that_saves_it_otherwise(
    zipped: bool, tmp_path: Path
) -> None:
    cache = DynamicCache()
    cache.update(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), 0)
    cache.bomb = Bomb()
    path = tmp_path / "cache.pt"
    torch.save(cache, path, _use_new_zipfile_serialization=zipped)
    said = refusal(path)
    assert "a pickle of torch.save, which is never loaded here" in said
    assert "save_cache of docs/foreign.md" in said


def database(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE Cache (key BLOB, value BLOB)")
    connection.close()


def test_a_folder_of_a_disk_cache_is_known(tmp_path: Path) -> None:
    database(tmp_path / "cache.db")
    (tmp_path / "51").mkdir()
    (tmp_path / "51" / "d4.val").write_bytes(pickle.dumps(Bomb()))
    assert "a LlamaDiskCache, a folder of pickles" in refusal(tmp_path)
    assert "an SQLite database" in refusal(tmp_path / "cache.db")
    assert "a pickle" in refusal(tmp_path / "51" / "d4.val")


def test_other_folders_are_no_files(tmp_path: Path) -> None:
    assert "this is a folder, and no file" in refusal(tmp_path)
    (tmp_path / "cache.db").write_bytes(b"something else")
    assert "this is a folder, and no file" in refusal(tmp_path)
    (tmp_path / "cache.db").unlink()
    (tmp_path / "cache.db").mkdir()
    assert "this is a folder, and no file" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("first", "says"),
    [
        (b"GGUF\x03\0\0\0", "a model, and no state"),
        (b"PK\x03\x04" + bytes(22) + b"\x05\0\0\0a.txt", "a zip file: unpack it"),
        (b"\x1f\x8b\x08", "a compressed file: unpack it"),
        (b"\x28\xb5\x2f\xfd", "a compressed file: unpack it"),
        (b"", "no file that is read here"),
        (b"PK", "no file that is read here"),
        (b"\x80", "no file that is read here"),
        (b"\x80\x01", "no file that is read here"),
        (b"(c) somebody", "no file that is read here"),
        (b"(local notes)", "no file that is read here"),
    ],
)
def test_other_files_are_told_by_their_first_bytes(first: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(first)
    assert says in refusal(path)
