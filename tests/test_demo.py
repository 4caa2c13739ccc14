"""The demo's claim, on a tiny model: another process says what the first would have said next."""

from __future__ import annotations

from pathlib import Path

from benchmarks import demo
from tests.tiny import write_tiny


def test_the_second_half_says_what_the_first_would_have_said(tmp_path: Path) -> None:
    model = str(write_tiny(tmp_path / "tiny.gguf", context=16384))
    first = demo.first_half(model, tmp_path)
    second = demo.second_half(model, tmp_path)
    assert second["next"] == first["next"]
    assert (second["recomputed"], second["reason"]) == (0, "exact")
    assert first["stored"] > 0
