"""Variations of a family's oracle: what `build` remembers a model by must be hashable."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file


def lists(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Tuples as the lists that configurations have."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in changes.items()}


def nest(folder: Path, trunk: str, model_type: str) -> None:
    """The same model as part of one that also sees: its decoder under the prefix `trunk`, its configuration
    within a larger one of `model_type`."""
    path = folder / "model.safetensors"
    outer = trunk.removesuffix(".model")
    names = {"model.": f"{trunk}.", "lm_head.": f"{outer}.lm_head." if outer != trunk else "lm_head."}
    tensors = {}
    for name, tensor in load_file(path).items():
        first = next(prefix for prefix in names if name.startswith(prefix))
        tensors[names[first] + name.removeprefix(first)] = tensor
    save_file(tensors, path)
    config = folder / "config.json"
    inner = json.loads(config.read_text())
    config.write_text(json.dumps({"model_type": model_type, "text_config": inner}))
