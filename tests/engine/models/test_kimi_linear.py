"""Kimi Linear against transformers, and Kimi K3's bounded forgetting."""

from __future__ import annotations

from pathlib import Path

from tests.oracles.base import check_numbers


def test_numbers(tmp_path: Path) -> None:
    check_numbers("kimi_linear", tmp_path)


def test_bounded_forgetting(tmp_path: Path) -> None:
    check_numbers("kimi_linear", tmp_path, bound=-5.0)
