"""Blocks of Gemma 3n: one of several streams goes through the layer, beside a low-rank shortcut (LAuReL,
Menghani et al. 2024), and most gates of early layers are shut."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch

from engine.linear import Linear
from engine.models.altup import AltUp, load_altup
from engine.models.decoder import Pass
from engine.models.fields import Fields
from engine.models.gemma3 import gelu
from engine.models.gemma_layers import (
    Heads,
    LayerInputMix,
    NormedAttention,
    load_layer_input_mix,
    load_normed_attention,
)
from engine.models.layers import Activation, FeedForward, RmsNorm
from engine.models.loading import Loader, check_bias, hub_ffn
from engine.models.sizes import Sizes


@dataclass(frozen=True, slots=True)
class SparseGelu:
    """gelu of what a gate is above the mean of its token's gates and `deviations` more; 0 where it is not.
    Were gates of a token normally distributed, the share Φ(deviations) of them would be shut."""

    deviations: float

    def __call__(self, gate: torch.Tensor) -> torch.Tensor:
        wide = gate.float()
        deviation, mean = torch.std_mean(wide, -1, keepdim=True, correction=0)
        return gelu((wide - mean - deviation * self.deviations).relu()).to(gate.dtype)


@dataclass(frozen=True, slots=True)
class Laurel:
    """x + norm(right(left(x)))."""

    left: Linear
    right: Linear
    norm: RmsNorm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, width] in the model's dtype to float32."""
        return x.float() + self.norm(self.right(self.left(x)).float())


@dataclass(frozen=True, slots=True)
class Gemma3nBlock:
    """`output_scale` [width] is that of the active stream where the layer's own input joins it."""

    altup: AltUp
    attention_norm: RmsNorm
    laurel: Laurel
    attention: NormedAttention
    after_attention_norm: RmsNorm
    ffn_norm: RmsNorm
    ffn: FeedForward
    after_ffn_norm: RmsNorm
    mix: LayerInputMix
    output_scale: torch.Tensor | None

    def __call__(self, streams: torch.Tensor, given: torch.Tensor, step: Pass) -> torch.Tensor:
        """float32 [streams, tokens, width] to the same; `given` is the layer's own input."""
        predictions = self.altup.predicted(streams)
        x = predictions[self.altup.active]
        h = self.attention_norm(x).to(step.dtype)
        attended = self.after_attention_norm(self.attention(h, step).float())
        x = (x + attended + self.laurel(h)) * math.sqrt(0.5)
        x = x + self.after_ffn_norm(self.ffn(self.ffn_norm(x).to(step.dtype)).float())
        corrected = self.altup.corrected(predictions, x)
        active = corrected[self.altup.active]
        if self.output_scale is not None:
            active = active * self.output_scale
        # The first stream goes without, whichever is the active one.
        return torch.cat((corrected[:1], corrected[1:] + self.mix(active, given, step.dtype)))


class Gemma3nReader:
    """Blocks of one model."""

    def __init__(self, fields: Fields, load: Loader, sizes: Sizes, prefix: str, eps: float) -> None:
        self._fields = fields
        self._load = load
        self._sizes = sizes
        self._prefix = prefix
        self._eps = eps
        self.num_streams = fields.count("altup_num_inputs", 4)
        self._active = fields.count("altup_active_idx", 0, least=0, most=self.num_streams - 1)
        self._inner = fields.count_each("intermediate_size", sizes.num_layers)
        self._sparsity = _read_sparsity(fields, sizes.num_layers)
        self._heads = Heads(sizes.num_kv_heads, sizes.head_size)

    def block(self, layer: int, source: int, kind: str) -> Gemma3nBlock:
        load, fields, eps, prefix = self._load, self._fields, self._eps, f"{self._prefix}.layers.{layer}"
        sizes, width, attention = self._sizes, self._sizes.width, f"{prefix}.self_attn"
        check_bias(load, fields, f"{attention}.q_proj", False)
        scale = None
        if fields.flag("altup_correct_scale", True):
            scale = load.exact(f"{prefix}.altup.correct_output_scale", width)
        activation = _activation(self._sparsity[layer])
        # Gates that are shut by the mean of all of them cannot be divided among ranks.
        among = load.mirrored if self._sparsity[layer] else load
        return Gemma3nBlock(
            altup=load_altup(load, f"{prefix}.altup", self._active, self.num_streams, width, eps),
            attention_norm=self._norm(f"{prefix}.input_layernorm"),
            laurel=self._laurel(f"{prefix}.laurel"),
            attention=load_normed_attention(load, attention, sizes, self._heads, layer, source, kind, eps),
            after_attention_norm=self._norm(f"{prefix}.post_attention_layernorm"),
            ffn_norm=self._norm(f"{prefix}.pre_feedforward_layernorm"),
            ffn=hub_ffn(among, f"{prefix}.mlp", width, self._inner[layer], activation),
            after_ffn_norm=self._norm(f"{prefix}.post_feedforward_layernorm"),
            mix=load_layer_input_mix(load, prefix, width, fields.count("hidden_size_per_layer_input"), eps),
            output_scale=scale,
        )

    def _laurel(self, prefix: str) -> Laurel:
        load, width, rank = self._load, self._sizes.width, self._fields.count("laurel_rank", 64)
        return Laurel(
            left=load.linear((f"{prefix}.linear_left",), (rank,), width),
            right=load.linear((f"{prefix}.linear_right",), (width,), rank),
            norm=self._norm(f"{prefix}.post_laurel_norm"),
        )

    def _norm(self, name: str) -> RmsNorm:
        return self._load.norm(name, self._sizes.width, self._eps)


def _activation(sparsity: float) -> Activation:
    return SparseGelu(NormalDist().inv_cdf(sparsity)) if sparsity > 0 else gelu


def _read_sparsity(fields: Fields, num_layers: int) -> tuple[float, ...]:
    """The share of gates of each layer that are to be shut: of the first ten, where nothing is said."""
    if not fields.has("activation_sparsity_pattern"):
        num_sparse = 10 if num_layers > 10 else 0
        return (0.95,) * num_sparse + (0.0,) * (num_layers - num_sparse)
    given = fields.numbers("activation_sparsity_pattern")
    if len(given) != num_layers or not all(0 <= share < 1 for share in given):
        raise fields.refused("activation_sparsity_pattern", list(given))
    return given
