"""Configurations as older or larger files have them: other words for the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.engine.reading import read_all
from tests.engine.weights.folders import change_config
from tests.oracles.base import open_engine, reference, tokens, write


def check_reworded(
    family: str, folder: Path, words: dict[str, Any], atol: float = 1e-4, **changes: Any
) -> None:
    """With `words` in place of what the library writes (... removes a field), the folder is the same."""
    write(family, folder, **changes)
    change_config(folder, **words)
    check_full_pass(family, folder, atol, **changes)


def check_full_pass(family: str, folder: Path, atol: float = 1e-4, **changes: Any) -> None:
    """Logits of one pass are the reference's."""
    ids = tokens()
    ours = torch.cat([logits for _, logits in read_all(open_engine(folder), ids, (len(ids),))])
    torch.testing.assert_close(ours, reference(family, ids, **changes), atol=atol, rtol=0)
