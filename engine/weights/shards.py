"""The safetensors files of a folder: one, or several with an index. Headers are checked by the library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import WeightsRefused

_MAX_JSON = 64 * 2**20
#: Numbers as they are; integers of fewer bits are codes of a quantized checkpoint.
_DTYPES = frozenset({"F64", "F32", "F16", "BF16", "I64", "I32"})


class Shards:
    """Tensors by their stored names, read one at a time. Raises WeightsRefused for damaged files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = _weight_files(folder)
        self._handles: dict[str, Any] = {}
        for path in self.files:
            try:
                handle: Any = safe_open(path, framework="pt")
                names = list(handle.keys())
            except (SafetensorError, OSError) as error:
                raise WeightsRefused(f"{path.name} cannot be read: {error}") from error
            for name in names:
                if name in self._handles:
                    raise WeightsRefused(f"{folder.name}: tensor {name} is in two files")
                self._handles[name] = handle

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._handles)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handles[name].get_slice(name).get_shape())

    def tensor(self, name: str) -> torch.Tensor:
        """As it is stored; it may share the file's memory."""
        handle = self._handles[name]
        dtype = handle.get_slice(name).get_dtype()
        if dtype not in _DTYPES:
            raise WeightsRefused(f"{self.folder.name}: tensor {name} is stored as {dtype}, which is not read")
        value: torch.Tensor = handle.get_tensor(name)
        return value


def read_json(path: Path) -> Mapping[str, Any]:
    """The object in a file. Raises WeightsRefused for what is none, FileNotFoundError without a file."""
    if path.stat().st_size > _MAX_JSON:
        raise WeightsRefused(f"{path.name} is {path.stat().st_size} bytes long")
    try:
        tree = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise WeightsRefused(f"{path.name} is not JSON: {error}") from error
    if not isinstance(tree, dict):
        raise WeightsRefused(f"{path.name} is not a JSON object")
    return tree


def _weight_files(folder: Path) -> tuple[Path, ...]:
    """Sorted by name."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return _indexed(folder, read_json(index))
    whole = folder / "model.safetensors"
    found = [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return (found[0],)
    if found:
        raise WeightsRefused(f"{folder.name}: {len(found)} safetensors files and no index that joins them")
    if any(folder.glob("*.bin")):
        raise WeightsRefused(f"{folder.name}: pickled weights are not read; convert them to safetensors")
    raise WeightsRefused(f"{folder.name}: there is no safetensors file in it")


def _indexed(folder: Path, index: Mapping[str, Any]) -> tuple[Path, ...]:
    table = index.get("weight_map")
    if not isinstance(table, dict) or not table:
        raise WeightsRefused(f"{folder.name}: the safetensors index has no weight_map")
    names = {str(name) for name in table.values()}
    for name in names:
        # A name in a file is a stranger's word: it may not lead out of the folder.
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise WeightsRefused(f"{folder.name}: the index names the file {name!r}")
        if not (folder / name).is_file():
            raise WeightsRefused(f"{folder.name}: {name} is missing")
    return tuple(folder / name for name in sorted(names))
