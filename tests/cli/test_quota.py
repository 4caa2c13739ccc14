"""What TENUTO_QUOTA says holds for every command: nothing is added beyond it, and what gives room goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Tenuto


def stored(root: Path) -> set[str]:
    return {path.name for path in (root / "store").rglob("*") if path.is_file() and len(path.name) >= 64}


def test_beyond_the_quota_commands_end_with_44_and_add_nothing(
    tenuto: Tenuto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tenuto("chat", "--name", "tea", "--max-tokens", "4", stdin="hello\n").code == 0
    assert tenuto("export", "tea", "tea.tenuto").code == 0
    before = stored(tmp_path)
    monkeypatch.setenv("TENUTO_QUOTA", "1k")
    for command in (
        ("fork", "tea"),
        ("save", "tea", "kept"),
        ("import", "tea.tenuto"),
    ):
        done = tenuto(*command)
        assert done.code == 44, (command, done)
        assert done.err.count("\n") == 1
        assert "1,000 may be" in done.err
        assert stored(tmp_path) == before
    told = tenuto("resume", "tea", "-p", "and then?", "--max-tokens", "4")
    assert "1,000 may be" in told.err, "what was said could not be saved, and it says so"
    assert stored(tmp_path) == before
    assert tenuto("rm", "tea", "--yes").code == 0


def test_a_quota_that_is_none_is_refused_by_its_name(tenuto: Tenuto, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENUTO_QUOTA", "plenty")
    done = tenuto("ls")
    assert done.code == 2
    assert "TENUTO_QUOTA" in done.err
