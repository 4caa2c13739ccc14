"""Qwen3.5 against transformers."""

from __future__ import annotations

from pathlib import Path

from tests.oracles.base import check_numbers


def test_numbers(tmp_path: Path) -> None:
    check_numbers("qwen3_5", tmp_path)
