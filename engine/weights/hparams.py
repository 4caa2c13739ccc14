"""Hyperparameters under one set of keys, checked: GGUF's keys without the architecture in front.

    block_count, context_length, embedding_length, feed_forward_length, vocab_size        int
    attention.head_count, attention.head_count_kv                                         int
    attention.key_length, attention.value_length     head size of K and V                 int
    attention.layer_norm_rms_epsilon                                                      float
    attention.scale                                  factor on q·k                        float
    attention.sliding_window                         tokens; absent: every layer is full  int
    attention.sliding_window_pattern                 n: layer i is windowed if i % n < n - 1; 0: all are  int
    rope.dimension_count                             features that turn (n_rot)           int
    rope.freq_base, rope.freq_base_swa               the latter for windowed layers       float
    rope.scaling.type                                none, linear, llama3, yarn, longrope, dynamic
    rope.scaling.factor, .original_context_length, .attn_factor, .yarn_beta_fast, ...     where given
    final_logit_softcapping, attn_logit_softcapping                                       where given
    tie_word_embeddings                              no output matrix of its own          bool

rope.scaling says nothing of windowed layers: where there are both, it is about the full ones alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from engine.errors import WeightsRefused

Hparam = int | float | bool | str

_COUNT_LIMITS: Mapping[str, int] = MappingProxyType(
    {
        "block_count": 4_096,
        "context_length": 2**31 - 1,
        "embedding_length": 2**20,
        "feed_forward_length": 2**22,
        "vocab_size": 2**24,
        "attention.head_count": 4_096,
        "attention.head_count_kv": 4_096,
        "attention.key_length": 8_192,
        "attention.value_length": 8_192,
        "rope.dimension_count": 8_192,
    }
)
_SCALINGS = ("none", "linear", "llama3", "yarn", "longrope", "dynamic")
#: Gemma 3's files say neither; these are the family's (its technical report, section 2).
_GEMMA3 = {"attention.sliding_window_pattern": 6, "rope.freq_base_swa": 10_000.0}
#: The one Gemma 3 that scales by the width of the model instead of the head: 27B, told by its depth.
_GEMMA3_27B_BLOCKS = 62


def checked_hparams(
    given: Mapping[str, object], *, architecture: str, model: str, tied: bool
) -> Mapping[str, Hparam]:
    """`given` with defaults filled in and every value checked.

    Raises WeightsRefused with the model's name and the field that is missing or out of range.
    """
    fields = _Fields(given, model)
    heads = fields.count("attention.head_count")
    embedding = fields.count("embedding_length")
    kv_heads = fields.count("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise fields.refused("attention.head_count_kv", kv_heads)
    fields.count("attention.key_length", embedding // heads or None)
    key_length = fields.count("attention.key_length")
    fields.count("attention.value_length", embedding // heads or None)
    n_rot = fields.count("rope.dimension_count", key_length)
    if n_rot > key_length or n_rot % 2:
        raise fields.refused("rope.dimension_count", n_rot)
    blocks = fields.count("block_count")
    for key in ("context_length", "feed_forward_length", "vocab_size"):
        fields.count(key)
    fields.real("attention.layer_norm_rms_epsilon", low=0.0, high=1.0)
    fields.real("rope.freq_base", low=1.0, high=1e12, default=10_000.0)
    if architecture == "gemma3":
        for key, default in _GEMMA3.items():
            fields.out.setdefault(key, default)
        fields.real("rope.freq_base_swa", low=1.0, high=1e12)
    wide = architecture == "gemma3" and blocks == _GEMMA3_27B_BLOCKS
    fields.real(
        "attention.scale", low=0.0, high=1e3, default=(embedding / heads if wide else key_length) ** -0.5
    )
    fields.window()
    fields.scaling()
    fields.out["tie_word_embeddings"] = tied
    return MappingProxyType(fields.out)


class _Fields:
    """The values under check; `out` is what they became."""

    def __init__(self, given: Mapping[str, object], model: str) -> None:
        self.model = model
        self.out: dict[str, Hparam] = {}
        for key, value in given.items():
            if isinstance(value, int | float | str):
                self.out[key] = value
            elif key in _COUNT_LIMITS:
                self.out[key] = self._uniform(key, value)

    def refused(self, key: str, value: object) -> WeightsRefused:
        return WeightsRefused(f"{self.model}: {key} = {repr(value)[:80]} makes no sense")

    def _uniform(self, key: str, value: object) -> Hparam:
        """Some files give a count per layer; they are read where all layers agree."""
        try:
            distinct = set(value)  # type: ignore[call-overload]
        except TypeError:
            raise self.refused(key, value) from None
        if len(distinct) != 1:
            raise WeightsRefused(f"{self.model}: {key} differs between layers, which is not supported")
        return int(distinct.pop())

    def count(self, key: str, default: int | None = None) -> int:
        value = self.out.setdefault(key, default) if default is not None else self.out.get(key)
        if value is None:
            raise WeightsRefused(f"{self.model}: {key} is missing")
        if type(value) is not int or not 1 <= value <= _COUNT_LIMITS[key]:
            raise self.refused(key, value)
        return value

    def real(self, key: str, *, low: float, high: float, default: float | None = None) -> float:
        value = self.out.get(key, default)
        if value is None:
            raise WeightsRefused(f"{self.model}: {key} is missing")
        if isinstance(value, bool | str) or not math.isfinite(value) or not low < value <= high:
            raise self.refused(key, value)
        self.out[key] = float(value)
        return float(value)

    def window(self) -> None:
        """A window of 0 tokens is how files say that there is none."""
        window = self.out.get("attention.sliding_window", 0)
        if type(window) is not int or not 0 <= window < 2**31:
            raise self.refused("attention.sliding_window", window)
        if window == 0:
            self.out.pop("attention.sliding_window", None)
            self.out.pop("attention.sliding_window_pattern", None)
            return
        pattern = self.out.setdefault("attention.sliding_window_pattern", 0)
        if type(pattern) is not int or not 0 <= pattern <= 4_096:
            raise self.refused("attention.sliding_window_pattern", pattern)

    def scaling(self) -> None:
        legacy = self.out.pop("rope.scale_linear", None)
        if legacy is not None and "rope.scaling.type" not in self.out:
            self.out["rope.scaling.type"], self.out["rope.scaling.factor"] = "linear", legacy
        kind = self.out.setdefault("rope.scaling.type", "none")
        if kind not in _SCALINGS:
            raise self.refused("rope.scaling.type", kind)
        if kind == "none":
            return
        if kind in ("linear", "yarn", "dynamic"):
            self.real("rope.scaling.factor", low=0.0, high=1e6)
        for key in ("factor", "attn_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_log_multiplier"):
            if f"rope.scaling.{key}" in self.out:
                self.real(f"rope.scaling.{key}", low=-1e-9, high=1e6)
        original = self.out.get("rope.scaling.original_context_length", 1)
        if type(original) is not int or not 1 <= original < 2**31:
            raise self.refused("rope.scaling.original_context_length", original)
