"""Folders whose configuration says what the engine does not do: refused at load, by the field's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import WeightsRefused
from tests.oracles.base import open_engine, write


def check_refusals(family: str, folder: Path, cases: dict[str, Any]) -> None:
    """Each field of `cases`, with that value alone changed (... removes it), is refused by its name. A name
    "a.b" is the field b of the object a."""
    write(family, folder)
    path = folder / "config.json"
    plain = path.read_text()
    for name, value in cases.items():
        tree = json.loads(plain)
        *outer, field = name.split(".")
        inner = tree
        for part in outer:
            inner = inner[part]
        if value is ...:
            del inner[field]
        else:
            inner[field] = value
        path.write_text(json.dumps(tree))
        with pytest.raises(WeightsRefused, match=field):
            open_engine(folder)
