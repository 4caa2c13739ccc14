"""Variations of a family's oracle: what `build` remembers a model by must be hashable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def lists(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Tuples as the lists that configurations have."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in changes.items()}
