"""`Weights` of a Hugging Face folder under the names that the hub has for tensors and numbers.

The model's file of such a family reads its configuration field by field (`engine.models.fields`) and its
tensors as they are stored; nothing is renamed or re-ordered on the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from engine.errors import WeightsRefused
from engine.weights.hf_folder import HfFolder, read_config


class HubWeights(HfFolder):
    """An opened folder. Raises ModelNotFound where there is no config.json, WeightsRefused for damage."""

    def __init__(self, folder: Path, name: str | None = None) -> None:
        super().__init__(folder, name, read_config(folder))

    @property
    def architecture(self) -> str:
        """The hub's model_type, of the text model where there are several."""
        return str(self.hparams.get("model_type", ""))

    @cached_property
    def hparams(self) -> Mapping[str, Any]:
        """config.json, the text model's part of it laid over the rest."""
        inner = self._tree.get("text_config")
        return {**self._tree, **inner} if isinstance(inner, Mapping) else self._tree

    @cached_property
    def digest(self) -> str:
        """Over the weights' files in the order of their names. The configuration has a digest of its own
        (`engine.models.fields`)."""
        hasher = blake3()
        for path in self._shards.files:
            hasher.update(blake3(max_threads=blake3.AUTO).update_mmap(path).digest())
        return "b3-" + hasher.hexdigest()

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._shards.names))

    def has(self, name: str) -> bool:
        return name in self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shards.shape(self._known(name))

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self._shards.tensor(self._known(name)).to(dtype, copy=True).contiguous()

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self._shards.names)

    def _known(self, name: str) -> str:
        if name not in self._names:
            raise WeightsRefused(f"{self.name}: tensor {name} is missing")
        return name
