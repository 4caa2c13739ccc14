"""Blocks of Gemma 4: norms before and after each half, then what the layer makes of its own input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.linear import Linear
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
from engine.models.layers import FeedForward, RmsNorm
from engine.models.loading import Loader, check_bias, hub_ffn
from engine.models.moe import Experts
from engine.models.sizes import FULL, Sizes


@dataclass(frozen=True, slots=True)
class Dense:
    """ffn(norm x)."""

    norm: RmsNorm
    ffn: FeedForward

    def __call__(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.ffn(self.norm(x).to(dtype)).float()


@dataclass(frozen=True, slots=True)
class DenseAndRouted:
    """A feed-forward for every token beside the experts that it is routed to, each half normed for itself.

    The router sees x normed and times `router_scale`; probabilities of the chosen experts add up to 1, and
    then count `expert_scale` [experts] times.
    """

    dense: Dense
    after_dense: RmsNorm
    router: Linear
    router_scale: torch.Tensor
    expert_scale: torch.Tensor
    num_chosen: int
    norm: RmsNorm
    experts: Experts
    after_experts: RmsNorm

    def __call__(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        h = F.rms_norm(x, self.router_scale.shape, self.router_scale, self.norm.eps)
        weights, chosen = self.router(h.to(dtype)).float().softmax(-1).topk(self.num_chosen)
        weights = weights / weights.sum(-1, keepdim=True) * self.expert_scale[chosen]
        routed = self.experts(self.norm(x).to(dtype), chosen, weights)
        return self.after_dense(self.dense(x, dtype)) + self.after_experts(routed)


@dataclass(frozen=True, slots=True)
class Gemma4Block:
    """`scale` multiplies all that leaves the block."""

    attention_norm: RmsNorm
    attention: NormedAttention
    after_attention_norm: RmsNorm
    ffn: Callable[[torch.Tensor, torch.dtype], torch.Tensor]
    after_ffn_norm: RmsNorm
    mix: LayerInputMix | None
    scale: torch.Tensor

    def __call__(self, x: torch.Tensor, given: torch.Tensor | None, step: Pass) -> torch.Tensor:
        """float32 x [tokens, width]; `given` is the layer's own input, where there is one."""
        h = self.attention_norm(x).to(step.dtype)
        x = x + self.after_attention_norm(self.attention(h, step).float())
        x = x + self.after_ffn_norm(self.ffn(x, step.dtype))
        if self.mix is not None and given is not None:
            x = x + self.mix(x, given, step.dtype)
        return x * self.scale


class Gemma4Reader:
    """Blocks of one model."""

    def __init__(self, fields: Fields, load: Loader, sizes: Sizes, prefix: str, eps: float) -> None:
        self._fields = fields
        self._load = load
        self._sizes = sizes
        self._prefix = prefix
        self._eps = eps
        self._input_size = fields.count("hidden_size_per_layer_input", least=0)
        self._keys_are_values = fields.flag("attention_k_eq_v", False)
        self._has_experts = fields.flag("enable_moe_block", False)
        self._wide = fields.flag("use_double_wide_mlp", False)

    @property
    def has_layer_inputs(self) -> bool:
        return self._input_size > 0

    def block(self, layer: int, source: int, kind: str, heads: Heads) -> Gemma4Block:
        load, eps, prefix = self._load, self._eps, f"{self._prefix}.layers.{layer}"
        width, attention = self._sizes.width, f"{prefix}.self_attn"
        check_bias(load, self._fields, f"{attention}.q_proj", False)
        names = (
            ("q_proj", "k_proj") if self._keys_are_values and kind == FULL else ("q_proj", "k_proj", "v_proj")
        )
        mix = None
        if self.has_layer_inputs:
            mix = load_layer_input_mix(load, prefix, width, self._input_size, eps)
        return Gemma4Block(
            attention_norm=self._norm(f"{prefix}.input_layernorm"),
            attention=load_normed_attention(
                load, attention, self._sizes, heads, layer, source, kind, eps, names
            ),
            after_attention_norm=self._norm(f"{prefix}.post_attention_layernorm"),
            ffn=self._ffn(prefix, reads=source != layer),
            after_ffn_norm=self._norm(f"{prefix}.post_feedforward_layernorm"),
            mix=mix,
            scale=load.exact(f"{prefix}.layer_scalar", 1),
        )

    def _ffn(self, prefix: str, reads: bool) -> Dense | DenseAndRouted:
        """Layers that read another's rows may have twice the feed-forward."""
        load, fields, width = self._load, self._fields, self._sizes.width
        inner = fields.count("intermediate_size") * (2 if self._wide and reads else 1)
        dense = Dense(
            self._norm(f"{prefix}.pre_feedforward_layernorm"),
            hub_ffn(load, f"{prefix}.mlp", width, inner, gelu),
        )
        if not self._has_experts:
            return dense
        count, inner = fields.count("num_experts"), fields.count("moe_intermediate_size")
        return DenseAndRouted(
            dense=dense,
            after_dense=self._norm(f"{prefix}.post_feedforward_layernorm_1"),
            router=load.linear((f"{prefix}.router.proj",), (count,), width),
            router_scale=load.exact(f"{prefix}.router.scale", width) * width**-0.5,
            expert_scale=load.exact(f"{prefix}.router.per_expert_scale", count),
            num_chosen=fields.count("top_k_experts", most=count),
            norm=self._norm(f"{prefix}.pre_feedforward_layernorm_2"),
            experts=Experts(
                load.tensor(f"{prefix}.experts.gate_up_proj", count, 2 * inner, width),
                load.tensor(f"{prefix}.experts.down_proj", count, width, inner),
                gelu,
            ),
            after_experts=self._norm(f"{prefix}.post_feedforward_layernorm_2"),
        )

    def _norm(self, name: str) -> RmsNorm:
        return self._load.norm(name, self._sizes.width, self._eps)
