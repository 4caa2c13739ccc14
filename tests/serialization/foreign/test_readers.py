"""One table says what a file is and reads it: only ordinary files, of a size that is allowed, as they are."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest
import torch

from engine.errors import Corrupt, LimitExceeded, StateError, UnknownFormat, UsageError
from serialization.foreign import readers
from serialization.foreign.geometry import CacheRole, Geometry
from serialization.foreign.readers import Kind, kind_of, read_foreign
from serialization.foreign.tensor_file import write_tensor_file
from tests.golden.llama import Kv, owned, sequence_file
from tests.serialization.foreign.geometries import GEOMETRIES, rows
from tests.serialization.foreign.mlx_files import PLAIN, WINDOWS
from tests.serialization.foreign.test_torch_dump import ONE, plain

GOLDEN = Path(__file__).parents[2] / "golden"
LLAMA = GOLDEN / "foreign" / "plain.3.bin"
MLX = GOLDEN / "mlx-lm" / "plain-0.32.2.safetensors"


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    path = tmp_path / "dump.safetensors"
    path.write_bytes(plain())
    return path


def test_a_kind_is_told_by_what_is_in_a_file_and_not_by_its_name(tmp_path: Path, dump: Path) -> None:
    for source, kind in ((LLAMA, Kind.LLAMA_CPP), (MLX, Kind.MLX), (dump, Kind.TRANSFORMERS)):
        other = tmp_path / "other.pkl"
        other.write_bytes(source.read_bytes())
        assert kind_of(source) is kind_of(other) is kind


@pytest.mark.parametrize("length", [0x280, 0x380, 0x480, 0x580])
def test_a_header_whose_length_begins_as_a_pickle_is_a_header(length: int, tmp_path: Path) -> None:
    data = bytes(plain())
    header = data[8 : 8 + int.from_bytes(data[:8], "little")].ljust(length)
    path = tmp_path / "dump.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + header + data[8 + len(header.rstrip()) :].lstrip(b" "))
    assert path.read_bytes()[:2] == bytes((0x80, length >> 8))
    assert kind_of(path) is Kind.TRANSFORMERS
    assert read_foreign(path, ONE).length == 5


def test_every_kind_is_read(dump: Path) -> None:
    assert read_foreign(LLAMA, GEOMETRIES["plain"]).source.startswith("llama.cpp")
    assert read_foreign(MLX, PLAIN).source == "a prompt cache of mlx-lm"
    assert read_foreign(dump, ONE).source == "a dump of a transformers cache"


def test_token_ids_of_the_caller_reach_a_file_that_has_none(dump: Path) -> None:
    windows = GOLDEN / "mlx-lm" / "windows-0.32.2.safetensors"
    bare = GOLDEN / "foreign" / "plain.bare-2c.bin"
    ids = list(range(13))
    assert read_foreign(windows, WINDOWS, tokens=ids).tokens == tuple(ids)
    assert read_foreign(dump, ONE, tokens=ids).tokens == tuple(ids)
    assert read_foreign(bare, GEOMETRIES["plain"], tokens=ids, kind=Kind.LLAMA_CPP).tokens == tuple(ids)
    assert read_foreign(LLAMA, GEOMETRIES["plain"], tokens=ids).tokens != tuple(ids)


def test_a_bare_state_is_read_where_its_kind_is_said() -> None:
    bare = GOLDEN / "foreign" / "plain.bare-2c.bin"
    with pytest.raises(UnknownFormat, match="its first bytes are those of no file"):
        kind_of(bare)
    assert read_foreign(bare, GEOMETRIES["plain"], kind=Kind.LLAMA_CPP).length


def test_a_file_of_one_sequence_has_no_other(dump: Path) -> None:
    for path, geometry in ((MLX, PLAIN), (dump, ONE)):
        with pytest.raises(UsageError, match="holds one sequence"):
            read_foreign(path, geometry, sequence=1)


def test_safetensors_of_something_else_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"".join(write_tensor_file({}, {"format": "pt"})))
    with pytest.raises(UnknownFormat, match="neither a prompt cache of mlx-lm nor a dump"):
        kind_of(path)


def test_a_header_that_is_cut_short_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    path.write_bytes(MLX.read_bytes()[:100])
    with pytest.raises(Corrupt, match="the header should have"):
        kind_of(path)


def test_what_is_wrong_inside_a_file_is_told_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "cut.bin"
    path.write_bytes(
        sequence_file(3, (11,), Kv((0,), (owned(range(4), 0),), keys=("f16", 64), values=("f16", 64)))[:-4]
    )
    with pytest.raises(Corrupt, match=r"^\S+cut\.bin: "):
        read_foreign(path, Geometry("llama", 100, 1, (rows(CacheRole.FULL, 0, keys=64, values=64),)))


def test_what_is_no_ordinary_file_is_refused_and_nothing_waits(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UnknownFormat, match="no ordinary file"):
        kind_of(pipe)
    with pytest.raises(UnknownFormat, match="no ordinary file"):
        kind_of(Path("/dev/zero"))
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(str(tmp_path / "s"))
        with pytest.raises(UsageError):
            kind_of(tmp_path / "s")
    finally:
        listening.close()
    with pytest.raises(UsageError, match="no such file"):
        kind_of(tmp_path / "none")


def test_a_file_beyond_the_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "sparse.bin"
    path.write_bytes(LLAMA.read_bytes()[:16])
    os.truncate(path, 2**40)
    with pytest.raises(LimitExceeded, match=r"1,099,511,627,776 bytes are more than the 68,719,476,736"):
        read_foreign(path, GEOMETRIES["plain"])
    with pytest.raises(LimitExceeded):
        read_foreign(LLAMA, GEOMETRIES["plain"], limit=LLAMA.stat().st_size - 1)
    assert read_foreign(LLAMA, GEOMETRIES["plain"], limit=LLAMA.stat().st_size).length


@pytest.mark.parametrize("change", [-8, 8])
def test_a_file_that_changes_meanwhile_is_refused(
    change: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "growing.bin"
    path.write_bytes(LLAMA.read_bytes())
    size = path.stat().st_size
    told = readers._reader

    def cut(*args: object) -> object:
        os.truncate(path, size + change)
        return told(*args)  # type: ignore[arg-type]

    def at_first(file: int) -> os.stat_result:
        found = list(os.stat(file))
        found[6] = size
        return os.stat_result(found)

    monkeypatch.setattr(readers, "_reader", cut)
    monkeypatch.setattr(readers.os, "fstat", at_first)
    with pytest.raises(Corrupt, match="changed while it was read"):
        read_foreign(path, GEOMETRIES["plain"])


def test_rows_stay_when_the_file_is_gone_or_another(dump: Path) -> None:
    for path, geometry in ((LLAMA, GEOMETRIES["plain"]), (MLX, PLAIN), (dump, ONE)):
        copy = dump.parent / "copy"
        copy.write_bytes(path.read_bytes())
        state = read_foreign(copy, geometry)
        before = [rows.data.clone() for cells in state.caches for rows in cells.rows]
        copy.write_bytes(b"")
        after = [rows.data for cells in state.caches for rows in cells.rows]
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("path", [LLAMA, MLX, GOLDEN / "mlx-lm" / "quantized-0.31.3.safetensors"])
def test_a_file_cut_anywhere_is_refused(path: Path, tmp_path: Path) -> None:
    whole, cut = path.read_bytes(), tmp_path / "cut"
    geometry = GEOMETRIES["plain"] if path is LLAMA else PLAIN
    for length in {*range(0, min(len(whole), 400), 4), *range(0, len(whole), max(1, len(whole) // 60))}:
        cut.write_bytes(whole[:length])
        with pytest.raises(StateError):
            read_foreign(cut, geometry)


def test_two_threads_read_one_file() -> None:
    lengths: list[int] = []

    def work() -> None:
        lengths.append(read_foreign(MLX, PLAIN).length)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lengths == [7] * 4
