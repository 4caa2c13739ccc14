"""How a model file says that its RoPE is stretched, in the words of `engine.rope`."""

from __future__ import annotations

import torch

from engine.models.base import Reader, WeightSource
from engine.rope import RopeScaling


def read_scaling(weights: WeightSource, n_ctx: int) -> RopeScaling:
    """GGUF's `rope.scaling.*` numbers, and the factor tensors beside them.

    `n_ctx` chooses between longrope's two tables, once for the whole context.
    """
    read = Reader(weights)
    kind = read.text("rope.scaling.type", "none")
    original = read.count("rope.scaling.original_context_length", read.count("context_length"))
    factors = None
    if weights.has("rope_freqs.weight"):
        kind, factors = "llama3", weights.tensor("rope_freqs.weight", torch.float32)
    elif kind == "longrope":
        name = "rope_factors_long.weight" if n_ctx > original else "rope_factors_short.weight"
        factors = weights.tensor(name, torch.float32)
    return RopeScaling(
        kind=kind,
        factor=read.number("rope.scaling.factor", 1.0),
        original_context=original,
        factors=factors,
        attention_factor=_attention_factor(read),
        beta_fast=read.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=read.number("rope.scaling.yarn_beta_slow", 1.0),
        extrapolation=read.number("rope.scaling.yarn_ext_factor", 1.0),
        low_freq_factor=read.number("rope.scaling.low_freq_factor", 1.0),
        high_freq_factor=read.number("rope.scaling.high_freq_factor", 4.0),
    )


def _attention_factor(read: Reader) -> float | None:
    key = "rope.scaling.attn_factor"
    return read.number(key) if read.has(key) else None
