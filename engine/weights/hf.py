"""`Weights` of a Hugging Face folder: safetensors, config.json, tokenizer.json, and a chat template."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from engine.errors import ModelNotFound, WeightsRefused
from engine.weights.hf_config import HfConfig, token_ids
from engine.weights.hparams import Hparam, checked_hparams
from engine.weights.names import engine_name, is_norm
from engine.weights.shards import Shards, read_json
from engine.weights.vocabulary import HfTokenizerFiles

_MAX_TOKENIZER = 256 * 2**20
_MAX_TEMPLATE = 2**20


class HfWeights:
    """An opened folder. Raises ModelNotFound where there is no config.json, WeightsRefused for damage."""

    def __init__(self, folder: Path, name: str | None = None) -> None:
        self._folder = folder
        self.name = name or folder.resolve().name
        try:
            tree = read_json(folder / "config.json")
        except FileNotFoundError:
            raise ModelNotFound(
                f"no model in {folder}: it has no config.json (a GGUF file is named itself)"
            ) from None
        self._config = HfConfig(tree, self.name)

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
    def tokenizer_data(self) -> HfTokenizerFiles:
        path = self._folder / "tokenizer.json"
        if not path.is_file():
            raise WeightsRefused(f"{self.name}: the folder has no tokenizer.json")
        if path.stat().st_size > _MAX_TOKENIZER:
            raise WeightsRefused(f"{self.name}: tokenizer.json is {path.stat().st_size} bytes long")
        given = self._tokenizer_config
        ends = (*self._config.end_ids(), *token_ids(self._json("generation_config.json").get("eos_token_id")))
        settings = {
            "bos_token": _token_text(given.get("bos_token")),
            "eos_token": _token_text(given.get("eos_token")),
            "add_bos_token": given.get("add_bos_token"),
            "end_ids": tuple(sorted(set(ends))),
        }
        return HfTokenizerFiles(self.name, path.read_bytes(), settings)

    @cached_property
    def chat_template(self) -> str | None:
        """A file of its own, then the tokenizer's settings, then the older file of its own."""
        path = self._folder / "chat_template.jinja"
        if path.is_file():
            if path.stat().st_size > _MAX_TEMPLATE:
                raise WeightsRefused(f"{self.name}: chat_template.jinja is {path.stat().st_size} bytes long")
            return path.read_text(encoding="utf-8", errors="replace")
        for tree in (self._tokenizer_config, self._json("chat_template.json")):
            found = _template(tree.get("chat_template"))
            if found is not None:
                return found
        return None

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
    def _shards(self) -> Shards:
        return Shards(self._folder)

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

    @cached_property
    def _tokenizer_config(self) -> Mapping[str, Any]:
        return self._json("tokenizer_config.json")

    def _json(self, name: str) -> Mapping[str, Any]:
        """A file that may be absent."""
        path = self._folder / name
        return read_json(path) if path.is_file() else {}

    def _stored_name(self, name: str) -> str:
        try:
            return self._stored[name]
        except KeyError:
            raise WeightsRefused(f"{self.name}: tensor {name} is missing") from None


def _token_text(value: object) -> str | None:
    """A token as settings write it: its text, or an object with the text inside."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _template(value: object) -> str | None:
    """One template, or the default one of several."""
    if isinstance(value, str):
        return value
    named = value if isinstance(value, list) else []
    found = [item for item in named if isinstance(item, Mapping) and item.get("name") == "default"]
    return _template(found[0].get("template")) if found else None
