"""What every Hugging Face folder has beside its weights: a tokenizer, a chat template, settings."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from engine.errors import ModelNotFound, WeightsRefused
from engine.weights.hf_config import token_ids
from engine.weights.shards import Shards, read_json
from engine.weights.vocabulary import HfTokenizerFiles

_MAX_TOKENIZER = 256 * 2**20
_MAX_TEMPLATE = 2**20


class HfFolder:
    """An opened folder. Raises WeightsRefused for damage."""

    def __init__(self, folder: Path, name: str | None, config: Mapping[str, Any]) -> None:
        self._folder = folder
        self._tree = config
        self.name = name or folder.resolve().name

    @cached_property
    def tokenizer_data(self) -> HfTokenizerFiles:
        path = self._folder / "tokenizer.json"
        if not path.is_file():
            raise WeightsRefused(f"{self.name}: the folder has no tokenizer.json")
        if path.stat().st_size > _MAX_TOKENIZER:
            raise WeightsRefused(f"{self.name}: tokenizer.json is {path.stat().st_size} bytes long")
        given = self._tokenizer_config
        ends = (
            *token_ids(self._end_ids),
            *token_ids(self._json("generation_config.json").get("eos_token_id")),
        )
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
    def _shards(self) -> Shards:
        return Shards(self._folder)

    @property
    def _end_ids(self) -> object:
        inner = self._tree.get("text_config")
        given = {**self._tree, **inner} if isinstance(inner, Mapping) else self._tree
        return given.get("eos_token_id")

    @cached_property
    def _tokenizer_config(self) -> Mapping[str, Any]:
        return self._json("tokenizer_config.json")

    def _json(self, name: str) -> Mapping[str, Any]:
        """A file that may be absent."""
        path = self._folder / name
        return read_json(path) if path.is_file() else {}


def read_config(folder: Path) -> Mapping[str, Any]:
    """The config.json of a folder. Raises ModelNotFound where there is none, WeightsRefused for damage."""
    try:
        tree = read_json(folder / "config.json")
    except FileNotFoundError:
        raise ModelNotFound(
            f"no model in {folder}: it has no config.json (a GGUF file is named itself)"
        ) from None
    inner = tree.get("text_config")
    for part in (tree, inner) if isinstance(inner, Mapping) else (tree,):
        if not isinstance(part.get("model_type", ""), str):
            raise WeightsRefused(f"{folder.name}: model_type of config.json is no word")
        if not isinstance(part.get("eos_token_id"), int | list | None):
            raise WeightsRefused(f"{folder.name}: eos_token_id of config.json is no number and no list")
    return tree


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
