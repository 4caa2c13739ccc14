"""Which family of llama.cpp is which of ours, and in which order its rows are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from serialization.foreign.geometry import CellExtension, Pairing


@dataclass(frozen=True, slots=True)
class Family:
    """What llama.cpp calls a family (`name`, as in GGUF's `general.architecture`), and which values of a key
    head it turns together. `extension` is what its cells say beside their position. `one_cache`: windows or
    not, it keeps all layers in one cache of every token. `written`: states of ours were loaded by llama.cpp
    and went on there."""

    name: str
    pairing: Pairing = Pairing.HALVES
    extension: CellExtension = CellExtension.NONE
    one_cache: bool = False
    written: bool = False


_PAIRS = Pairing.INTERLEAVED

#: by the architecture in a fingerprint; what is not here has no equivalent that is known
FAMILIES: Mapping[str, Family] = {
    "bamba": Family("granitehybrid", _PAIRS),
    "cohere2": Family("cohere2", _PAIRS),
    "deepseek_v2": Family("deepseek2", _PAIRS),
    "deepseek_v3": Family("deepseek2", _PAIRS),
    "falcon_h1": Family("falcon-h1"),
    "falcon_mamba": Family("mamba"),
    "gemma2": Family("gemma2"),
    "gemma3": Family("gemma3", written=True),
    "gemma3n_text": Family("gemma3n"),
    "gemma4_text": Family("gemma4"),
    "gpt_oss": Family("gpt-oss"),
    "granitemoehybrid": Family("granitehybrid", _PAIRS),
    "jamba": Family("jamba"),
    "lfm2": Family("lfm2"),
    "llama": Family("llama", _PAIRS, one_cache=True, written=True),
    "llama4_text": Family("llama4", _PAIRS),
    "mamba": Family("mamba"),
    "mamba2": Family("mamba2"),
    "mistral": Family("llama", _PAIRS, one_cache=True, written=True),
    "nemotron_h": Family("nemotron_h"),
    "phi": Family("phi2"),
    "phi3": Family("phi3", one_cache=True),
    "qwen2": Family("qwen2", one_cache=True, written=True),
    "qwen3": Family("qwen3", one_cache=True, written=True),
    "qwen3_5_text": Family("qwen35", extension=CellExtension.POSITION_2D),
    "qwen3_next": Family("qwen3next"),
}
