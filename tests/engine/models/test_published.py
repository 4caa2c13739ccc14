"""Configurations as publishers have them, without their weights: each is understood, and the tensors that the
engine would read have as many values as the published model.

`published/` has a config.json of each, without the fields that say nothing of a model's numbers (ids of
special tokens, dropout, the start of training).
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.errors import WeightsRefused
from engine.models.base import Placement
from engine.models.loading import Loader
from engine.models.table import build_model
from engine.weights.source import open_weights
from tests.engine.weights.folders import write_tokenizer

FOLDER = Path(__file__).parent / "published"

#: values in all tensors of the decoder; layers that predict further tokens are not part of it
SIZES = {
    "bamba-9b": 9_780_235_392,
    "codestral-mamba": 7_285_403_648,
    "command-r7b": 8_028_033_024,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,
    "deepseek-v32": 671_877_944_064,
    "deepseek-v4-flash": 284_334_567_511,
    "falcon-h1-05b": 521_411_104,
    "falcon-mamba-7b": 7_272_665_088,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3n-e2b": 4_435_182_688,
    "gemma-4-26b-a4b": 25_233_141_790,
    "gemma-4-e2b": 4_628_569_379,
    "glm-5": 743_911_218_432,
    "glm-53-flash": 313_326_811_966,
    "gpt-oss-20b": 20_914_757_184,
    "granite-4-h-micro": 3_191_396_096,
    "granite-4-h-tiny": 6_939_037_248,
    "jamba-mini": 51_570_323_328,
    "kimi-linear-48b": 49_122_681_728,
    "lfm2-12b": 1_170_340_608,
    "lfm2-350m": 354_483_968,
    "lfm25-350m": 354_483_968,
    "llama-4-scout": 107_769_861_120,
    "longcat-flash": 560_664_980_480,
    "mamba-130m": 129_135_360,
    "mamba2-130m": 128_989_632,
    "mimo-v2-flash": 308_778_780_864,
    "minimax-m3": 426_174_572_928,
    "nemotron-3-nano": 31_577_940_288,
    "nemotron-h-8b": 8_100_852_736,
    "olmo-hybrid-7b": 7_430_870_688,
    "phi-2": 2_779_683_840,
    "phi-3-mini-128k": 3_821_079_552,
    "phi-3-mini-4k": 3_821_079_552,
    "phi-35-mini": 3_821_079_552,
    "phi-4-mini": 3_836_021_760,
    "qwen3-next-80b": 79_674_391_296,
    "qwen35-4b": 4_205_751_296,
    "qwen38-flash-next": 176_943_899_520,
    "recurrentgemma-2b": 2_682_862_080,
    "zamba2-12b": 1_215_064_704,
}
#: where the decoder is in models that see or hear too
_PREFIXES = {
    "gemma3n_text": "model.language_model.",
    "gemma4_text": "model.language_model.",
    "glm5_next_text": "model.language_model.",
    "llama4_text": "language_model.",
    "minimax_m3_vl": "language_model.",
    "qwen3_5_text": "model.language_model.",
    "qwen4_exp_text": "model.language_model.",
}
#: families whose files have the experts of a layer in two tensors
_FUSED = {"gemma4_text", "gpt_oss", "llama4_text", "qwen4_exp_text"}
#: families whose files have no output matrix, and need not say so
_TIED = {"cohere2", "gemma2", "gemma3n_text", "lfm2", "mamba", "recurrent_gemma", "zamba2"}
#: the biases that files have; in other families there are none but those of convolutions and step sizes
_BIASES = {
    "deepseek_v4": r"gate\.bias",
    "gpt_oss": r"self_attn\.[qkvo]_proj\.bias|router\.bias",
    "phi": r"\.bias",
    "recurrent_gemma": r"linear_(x|y|out)|conv_1d|o_proj|mlp_block",
    "minimax_m3_vl": r"e_score_correction",
}
_BIASES_OF_ANY = r"(mamba|mixer)\.conv1d\.bias|dt_proj\.bias|\.k_norm\.bias"
#: names that transformers would write, and files of the hub do not have
_ABSENT = {
    "deepseek_v4": r"^model\.|^embed_tokens|^hc_head\.",
    "kimi_linear": r"block_sparse_moe\.gate_proj",
    "minimax_m3_vl": r"\.indexer\.|\.mlp\.(experts|shared_experts|gate\.)|gate_up_proj",
    "qwen4_exp_text": r"ngram_embedding\.weight|layer_multipliers|ngram_heads_",
}
_ABSENT_OF_ANY = r"backbone\.embedding\.|k_rope_only_layernorm|self_attn\.(\d\.)?g_proj"


class Header:
    """What a published file says that it has."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.hparams = {**config, **config.get("text_config", {})}
        self.architecture = kind = str(self.hparams["model_type"])
        self.read: dict[str, tuple[int, ...]] = {}
        self._prefix = _PREFIXES.get(kind, "")
        self._head_outside = self._prefix == "model.language_model."
        absent = [_ABSENT_OF_ANY, _ABSENT.get(kind, "")]
        absent += ["" if kind in _FUSED else r"experts\.gate_up_proj"]
        absent += ["" if kind in _PREFIXES else "language_model"]
        absent += ["lm_head" if self.hparams.get("tie_word_embeddings", kind in _TIED) else ""]
        self._absent = re.compile("|".join(filter(None, absent)))
        self._biases = re.compile("|".join(filter(None, (_BIASES_OF_ANY, _BIASES.get(kind)))))

    def has(self, name: str) -> bool:
        inside = name.startswith(self._prefix) or (self._head_outside and name == "lm_head.weight")
        if not inside or self._absent.search(name):
            return False
        return not name.endswith(".bias") or bool(self._biases.search(name))

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        raise AssertionError("there are no weights")


@functools.cache
def _unwritten(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _sized(self: Any, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """In place of a loader's own: a tensor of the shape that is asked for, without values."""
    if not self._weights.has(name):
        raise WeightsRefused(f"the model lacks the tensor {name}")
    self._weights.read[name] = shape
    if name.endswith("tid2eid"):  # its values are looked at
        return torch.zeros(shape, dtype=dtype)
    return _unwritten(dtype, shape)


def test_every_configuration_has_its_size() -> None:
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(SIZES)


@pytest.mark.parametrize("name", SIZES)
def test_an_empty_file_lacks_the_first_tensor(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((FOLDER / f"{name}.json").read_text())
    save_file({}, tmp_path / "model.safetensors")
    write_tokenizer(tmp_path)
    with pytest.raises(WeightsRefused, match=r"the model lacks the tensor [\w.]+\.weight"):
        build_model(open_weights(tmp_path), Placement(torch.float32, torch.device("cpu"), 4096))


@pytest.mark.parametrize("name", SIZES)
def test_the_tensors_that_are_read_are_all_of_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loader, "_checked", _sized)
    header = Header(json.loads((FOLDER / f"{name}.json").read_text()))
    model = build_model(header, Placement(torch.bfloat16, torch.device("meta"), 4096))
    assert sum(map(math.prod, header.read.values())) == SIZES[name]
    assert model.needs.parts
    assert model.vocab_size == header.hparams["vocab_size"]
