"""A file that a command writes appears whole or not at all, and what goes wrong is told by its name."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from cli.files import replacing
from engine.errors import StoreFull, UsageError


def test_a_full_disk_is_told_as_such_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    target = tmp_path / "talk.tenuto"
    target.write_bytes(b"before")
    with pytest.raises(StoreFull, match=r"talk\.tenuto: no room"), replacing(target, force=True) as out:
        out.write(b"more")
    assert [path.name for path in tmp_path.iterdir()] == ["talk.tenuto"]
    assert target.read_bytes() == b"before"


def test_a_folder_that_is_not_there_is_named_and_not_a_temporary_file(tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match="there is no folder") as error,
        replacing(tmp_path / "no" / "x.tenuto"),
    ):
        pass
    assert ".x." not in str(error.value)
