"""LFM2 against transformers."""

from __future__ import annotations

from pathlib import Path

from tests.oracles.base import check_numbers


def test_numbers(tmp_path: Path) -> None:
    check_numbers("lfm2", tmp_path)


def test_numbers_of_convolutions_alone(tmp_path: Path) -> None:
    check_numbers("lfm2", tmp_path, kinds="conv conv conv")
