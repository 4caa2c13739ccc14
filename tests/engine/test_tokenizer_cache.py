"""Built tokenizers on disk: read when they are whole, built again when they are not, never in the way."""

from __future__ import annotations

from pathlib import Path

import pytest
from blake3 import blake3
from tokenizers import Tokenizer, models

from engine.tokenizer_cache import cached

VOCAB = {"a": 0, "b": 1, "ab": 2}


class Builder:
    """Builds the same tokenizer, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> Tokenizer:
        self.count += 1
        return Tokenizer(models.BPE(VOCAB, [("a", "b")]))


@pytest.fixture
def build() -> Builder:
    return Builder()


def kept(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def ids(tokenizer: Tokenizer) -> list[int]:
    return list(tokenizer.encode("aabb").ids)


def test_a_tokenizer_is_built_once(build: Builder, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    first, second = (cached(folder, "b3-1", build) for _ in range(2))
    assert build.count == 1
    assert ids(first) == ids(second) == [0, 2, 1]


def test_vocabularies_do_not_share_files(build: Builder, tmp_path: Path) -> None:
    cached(tmp_path, "b3-1", build)
    cached(tmp_path, "b3-2", build)
    assert build.count == 2


def test_without_a_folder_it_is_built_each_time(build: Builder) -> None:
    cached(None, "b3-1", build)
    cached(None, "b3-1", build)
    assert build.count == 2


def test_a_file_with_any_byte_changed_is_built_again_and_mended(build: Builder, tmp_path: Path) -> None:
    cached(tmp_path, "b3-1", build)
    path = kept(tmp_path)
    whole = path.read_bytes()
    for position in range(len(whole)):
        changed = bytearray(whole)
        changed[position] ^= 1
        path.write_bytes(changed)
        before = build.count
        assert ids(cached(tmp_path, "b3-1", build)) == [0, 2, 1]
        assert build.count == before + 1
        assert path.read_bytes() == whole


def test_a_file_cut_anywhere_is_built_again(build: Builder, tmp_path: Path) -> None:
    cached(tmp_path, "b3-1", build)
    path = kept(tmp_path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        cached(tmp_path, "b3-1", build)
        assert path.read_bytes() == whole


def test_a_file_that_the_library_does_not_read_is_built_again(build: Builder, tmp_path: Path) -> None:
    cached(tmp_path, "b3-1", build)
    path = kept(tmp_path)
    body = b'{"version": "9.0"}'
    head = path.read_bytes().split(b" b3-")[0] + b" b3-" + blake3(body).hexdigest().encode()
    path.write_bytes(head + b"\n" + body)
    assert ids(cached(tmp_path, "b3-1", build)) == [0, 2, 1]
    assert build.count == 2


def test_a_folder_that_cannot_be_written_to_is_no_error(build: Builder, tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    assert ids(cached(in_the_way, "b3-1", build)) == [0, 2, 1]
    assert ids(cached(in_the_way / "deeper", "b3-1", build)) == [0, 2, 1]


def test_a_write_that_fails_leaves_nothing(
    build: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert ids(cached(tmp_path, "b3-1", build)) == [0, 2, 1]
    assert list(tmp_path.iterdir()) == []
