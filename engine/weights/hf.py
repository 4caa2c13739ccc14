"""`Weights` of a Hugging Face folder whose family has GGUF's names for tensors and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import torch
from blake3 import blake3

from engine.errors import WeightsRefused
from engine.weights.hf_config import HfConfig
from engine.weights.hf_folder import HfFolder, read_config
from engine.weights.hparams import Hparam, checked_hparams
from engine.weights.names import engine_name, is_norm


class HfWeights(HfFolder):
    """An opened folder. Raises ModelNotFound where there is no config.json, WeightsRefused for damage."""

    def __init__(self, folder: Path, name: str | None = None) -> None:
        super().__init__(folder, name, read_config(folder))
        self._config = HfConfig(self._tree, self.name)

    @property
    def architecture(self) -> str:
        return self._config.architecture

    @cached_property
    def hparams(self) -> Mapping[str, Hparam]:
        given = self._config.hparams()
        if self.has("token_embd.weight"):
            # The matrix decides, not the config: some folders pad the vocabulary.
            given["vocab_size"] = self.shape("token_embd.weight")[0]
        tied = not self.has("output.weight")
        if tied and self._config.ties is False:
            raise WeightsRefused(f"{self.name}: lm_head.weight is missing")
        return checked_hparams(given, architecture=self.architecture, model=self.name, tied=tied)

    @cached_property
    def digest(self) -> str:
        """Over the weights' files in the order of their names, and the checked hyperparameters."""
        hasher = blake3(repr(sorted(self.hparams.items())).encode())
        for path in self._shards.files:
            part = blake3(max_threads=blake3.AUTO).update_mmap(path)
            hasher.update(part.digest())
        return "b3-" + hasher.hexdigest()

    def names(self) -> tuple[str, ...]:
        return tuple(sorted((*self._stored, *self._factors)))

    def has(self, name: str) -> bool:
        return name in self._stored or name in self._factors

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._factors:
            return (len(self._factors[name]),)
        return self._shards.shape(self._stored_name(name))

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        if name in self._factors:
            return torch.tensor(self._factors[name], dtype=torch.float32).to(dtype)
        value = self._shards.tensor(self._stored_name(name))
        if self.architecture == "gemma3" and is_norm(name):
            # Added in float32: 1 + w rounded to bf16 is another norm.
            value = value.float() + 1.0
        return value.to(dtype, copy=True).contiguous()

    @cached_property
    def _stored(self) -> Mapping[str, str]:
        """Our name of every tensor that the engine knows -> the name in the file."""
        table: dict[str, str] = {}
        for stored in self._shards.names:
            ours = engine_name(self.architecture, stored)
            if ours is None or (ours == "output.weight" and self._config.ties):
                continue
            if ours in table:
                raise WeightsRefused(f"{self.name}: {stored} and {table[ours]} are the same tensor")
            table[ours] = stored
        return table

    @cached_property
    def _factors(self) -> Mapping[str, list[float]]:
        return self._config.factors()

    def _stored_name(self, name: str) -> str:
        try:
            return self._stored[name]
        except KeyError:
            raise WeightsRefused(f"{self.name}: tensor {name} is missing") from None
