"""`Weights` of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import torch
from blake3 import blake3

from engine.errors import WeightsRefused
from engine.weights.dequant import dequantized
from engine.weights.gguf import GgufFile, StringArray, TensorInfo
from engine.weights.hparams import Hparam, checked_hparams
from engine.weights.vocabulary import GgufVocabulary

#: Families whose q and k rows GGUF stores in pairs (2i, 2i + 1) that turn together.
_INTERLEAVED = frozenset({"llama"})


class GgufWeights:
    """An opened GGUF file. Raises WeightsRefused where it is damaged or incomplete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = GgufFile(path)
        if not isinstance(self._file.values.get("general.architecture"), str):
            raise WeightsRefused(f"{path.name}: general.architecture is missing")
        parts = self._file.values.get("split.count", 0)
        if isinstance(parts, int) and parts > 1:
            raise WeightsRefused(f"{path.name}: one of {parts} parts of a split model; join them first")

    @property
    def name(self) -> str:
        given = self._file.values.get("general.name")
        return given if isinstance(given, str) and given else self._path.stem

    @property
    def architecture(self) -> str:
        return str(self._file.values["general.architecture"])

    @cached_property
    def hparams(self) -> Mapping[str, Hparam]:
        prefix = self.architecture + "."
        given: dict[str, object] = {
            key.removeprefix(prefix): value
            for key, value in self._file.values.items()
            if key.startswith(prefix)
        }
        if self.has("token_embd.weight"):
            # The matrix decides, not the metadata: some files pad the vocabulary.
            given["vocab_size"] = self.shape("token_embd.weight")[0]
        if "rope.scaling.type" not in given and self.has("rope_freqs.weight"):
            given["rope.scaling.type"] = "llama3"
        return checked_hparams(
            given,
            architecture=self.architecture,
            model=self._path.name,
            tied=not self.has("output.weight"),
        )

    @cached_property
    def tokenizer_data(self) -> GgufVocabulary:
        return GgufVocabulary(self._file)

    @property
    def chat_template(self) -> str | None:
        value = self._file.values.get("tokenizer.chat_template")
        return value if isinstance(value, str) and not isinstance(value, StringArray) else None

    @cached_property
    def digest(self) -> str:
        hasher = blake3(max_threads=blake3.AUTO)
        hasher.update_mmap(self._path)
        return "b3-" + hasher.hexdigest()

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._file.tensors))

    def has(self, name: str) -> bool:
        return name in self._file.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._info(name).shape

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        info = self._info(name)
        value = dequantized(self._file.rows(name), info, dtype)
        if self.architecture in _INTERLEAVED:
            for part, heads in (("attn_q.", "head_count"), ("attn_k.", "head_count_kv")):
                if part in name:
                    return self._half_split(name, value, f"attention.{heads}")
        return value

    def _half_split(self, name: str, value: torch.Tensor, heads_key: str) -> torch.Tensor:
        """Rows of every head from (0, 1), (2, 3), ... to (0, n/2), (1, n/2 + 1), ...; n = n_rot."""
        heads, n_rot = int(self.hparams[heads_key]), int(self.hparams["rope.dimension_count"])
        if value.shape[0] != heads * int(self.hparams["attention.key_length"]):
            raise WeightsRefused(f"{self._path.name}: tensor {name} has {value.shape[0]} rows")
        by_head = value.reshape(heads, -1, *value.shape[1:])
        turned = by_head[:, :n_rot]
        parts = (turned[:, 0::2], turned[:, 1::2], by_head[:, n_rot:])
        return torch.cat(parts, dim=1).reshape(value.shape)

    def _info(self, name: str) -> TensorInfo:
        try:
            return self._file.tensors[name]
        except KeyError:
            raise WeightsRefused(f"{self._path.name}: tensor {name} is missing") from None
