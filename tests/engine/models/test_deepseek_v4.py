"""DeepSeek-V4 against transformers."""

from __future__ import annotations

from pathlib import Path

from tests.oracles.base import check_numbers


def test_numbers(tmp_path: Path) -> None:
    check_numbers("deepseek_v4", tmp_path)
