"""The Python with llama-cpp-python that the optional checks run: `make llama` makes it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[3]
_SCRIPT = Path(__file__).with_name("in_llama_cpp.py")
#: ggml's numbers of the dtypes of a cache
TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q5_0": 6, "q8_0": 8, "bf16": 30}


def llama_python() -> Path:
    """The one that LLAMA_PYTHON names, or that `make llama` made. Skips the test where there is none."""
    named = os.environ.get("LLAMA_PYTHON")
    python = Path(named) if named else _ROOT / ".venv-llama" / "bin" / "python"
    if not python.exists():
        pytest.skip("llama-cpp-python is not here: `make llama` builds it, and runs this")
    return python


def in_llama_cpp(
    model: Path, type_k: str, type_v: str, flash: bool, steps: Sequence[Sequence[object]]
) -> list[Any]:
    """What `in_llama_cpp.py` told of these steps."""
    said = {
        "model": str(model),
        "n_ctx": 1024,
        "type_k": TYPES[type_k],
        "type_v": TYPES[type_v],
        "flash_attn": flash,
        "steps": steps,
    }
    result = subprocess.run(
        [llama_python(), _SCRIPT], input=json.dumps(said), capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    told: list[Any] = json.loads(result.stdout)
    return told
