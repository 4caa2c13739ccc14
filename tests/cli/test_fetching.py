"""What a model's fetching says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cli.fetching import fetch_with_progress
from cli.output import Output


def test_where_no_terminal_is_no_bar_is_drawn(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fetch(name: str, folder: Path, progress: Callable[[int, int], None]) -> Path:
        progress(1, 2)
        return tmp_path / name

    monkeypatch.setattr("engine.weights.fetch.fetch", fetch)
    assert fetch_with_progress("smollm2", Output(False, False)) == tmp_path / "smollm2"
    assert capfd.readouterr() == ("", "")  # an error that follows is the only line
