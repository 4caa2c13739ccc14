"""What a tokenizer is built from, as the model file has it: read lazily, nothing built yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
from blake3 import blake3

from engine.errors import WeightsRefused
from engine.weights.gguf import GgufFile, StringArray

_PREFIX = "tokenizer.ggml."


class TokenKind(IntEnum):
    """What a token is for; numbers as GGUF has them."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class HfTokenizerFiles:
    """A Hugging Face folder's tokenizer: `tokenizer.json` as it is, and the parsed settings beside it.

    `settings` has bos_token and eos_token (text or None), add_bos_token (bool, or None where the files do not
    say) and end_ids (a tuple).
    """

    model: str
    source: bytes
    settings: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """`b3-<64 hex>` over the file and the settings that change ids."""
        settings = repr(sorted((key, repr(value)) for key, value in self.settings.items()))
        return "b3-" + blake3(self.source).update(settings.encode()).hexdigest()


class GgufVocabulary:
    """The `tokenizer.ggml.*` values of a GGUF file."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.model = file.path.name
        if not isinstance(file.values.get(_PREFIX + "tokens"), StringArray):
            raise WeightsRefused(f"{self.model}: the file carries no tokenizer")

    @property
    def architecture(self) -> str:
        return str(self._file.values.get("general.architecture", ""))

    @property
    def tokens(self) -> StringArray:
        return self.strings("tokens")

    @cached_property
    def kinds(self) -> Sequence[int]:
        """The TokenKind of every token; all NORMAL where the file has none."""
        values = self._file.values.get(_PREFIX + "token_type")
        if values is None:
            return [int(TokenKind.NORMAL)] * len(self.tokens)
        if not isinstance(values, np.ndarray) or len(values) != len(self.tokens):
            raise self.refused("token_type")
        return [int(v) for v in values.tolist()]

    @cached_property
    def scores(self) -> Sequence[float]:
        values = self._file.values.get(_PREFIX + "scores")
        if not isinstance(values, np.ndarray) or len(values) != len(self.tokens):
            raise self.refused("scores")
        return [float(v) for v in values.tolist()]

    @property
    def has_merges(self) -> bool:
        return _PREFIX + "merges" in self._file.values

    @property
    def merges(self) -> StringArray:
        return self.strings("merges")

    def refused(self, key: str) -> WeightsRefused:
        return WeightsRefused(f"{self.model}: {_PREFIX}{key} is missing or makes no sense")

    def strings(self, key: str) -> StringArray:
        value = self._file.values.get(_PREFIX + key)
        if not isinstance(value, StringArray):
            raise self.refused(key)
        return value

    def text(self, key: str, default: str) -> str:
        value = self._file.values.get(_PREFIX + key, default)
        if not isinstance(value, str):
            raise self.refused(key)
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._file.values.get(_PREFIX + key, default)
        if not isinstance(value, bool):
            raise self.refused(key)
        return value

    def token_id(self, key: str) -> int | None:
        """The id under `<key>_token_id`, or None where the file names none."""
        value = self._file.values.get(f"{_PREFIX}{key}_token_id")
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise self.refused(f"{key}_token_id")
        return value

    @cached_property
    def digest(self) -> str:
        """`b3-<64 hex>` over every tokenizer key and its stored value: all that ids depend on."""
        hasher = blake3(f"architecture={self.architecture}".encode())
        for key, (start, stop) in sorted(self._file.spans.items()):
            if key.startswith(_PREFIX):
                hasher.update(f"\n{len(key)}:{key}:{stop - start}:".encode())
                hasher.update(self._file.raw(start, stop))
        return "b3-" + hasher.hexdigest()


TokenizerData = GgufVocabulary | HfTokenizerFiles
