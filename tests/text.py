"""A real text of the project's own, for tests that need thousands of tokens of English."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def long_text() -> str:
    """About 2,500 tokens: the licence, which will not change."""
    return (ROOT / "LICENSE").read_text(encoding="utf-8")
