"""The two functions that docs/foreign.md gives to users of transformers, as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_PAGE = Path(__file__).parents[3] / "docs" / "foreign.md"


def functions() -> dict[str, Any]:
    """What the block of Python that defines them leaves behind."""
    (source,) = [
        block
        for block in re.findall(r"^```python\n(.*?)^```", _PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
        if "def save_cache" in block
    ]
    names: dict[str, Any] = {}
    exec(compile(source, str(_PAGE), "exec"), names)
    return names
