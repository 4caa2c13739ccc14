"""Where states are that llama.cpp really wrote: megabytes of real rows, which are not kept here.

A folder of NAME.bin and NAME.json (its model, tokens, and what came after them). It is the one that
LLAMA_STATES names, or `shared/fixtures/llama-state` in or beside the repository's folder.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_PLACES = [each / "shared" / "fixtures" / "llama-state" for each in (_ROOT, _ROOT.parent)]
if "LLAMA_STATES" in os.environ:
    _PLACES.insert(0, Path(os.environ["LLAMA_STATES"]))

#: every state that is there
NAMES = (
    "gemma3-f16-iswa",
    "old-0.3.16-smollm2-fa_off",
    "old-0.3.16-smollm2-session",
    "old-0.3.8-smollm2-fa_on",
    "old-0.3.8-smollm2-session",
    "smollm2-f16-fa_off",
    "smollm2-f16-fa_on",
    "smollm2-q8_0",
)


def llama_state(name: str) -> Path:
    """The path of NAME.bin; NAME.json is beside it. Skips the test where no folder has it."""
    for place in _PLACES:
        if (place / f"{name}.bin").exists():
            return place / f"{name}.bin"
    pytest.skip("states written by llama.cpp are not here (LLAMA_STATES names a folder of them)")
