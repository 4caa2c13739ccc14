"""LongCat-Flash: blocks of two attentions and two feed-forwards, and experts beside the second half, of which
some give back what they get (LongCat-Flash technical report, section 2). Latents are stretched by
sqrt(width / rank).

The attentions of block i keep their rows as layers 2i and 2i + 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.cache.memory import MemoryNeeds
from engine.linear import Linear
from engine.models.base import Placement, WeightSource
from engine.models.decoder import Decoder, Pass
from engine.models.fields import Fields
from engine.models.hub_experts import hub_experts
from engine.models.layers import FeedForward, RmsNorm
from engine.models.loading import Loader, check_bias, hub_ffn
from engine.models.mla import (
    LatentAttention,
    LatentSizes,
    latent_rows,
    load_latent_attention,
    read_latent_rope,
    read_latent_sizes,
    stretching,
)
from engine.models.mla_blocks import load_ends
from engine.models.mla_ffn import MAX_EXPERTS
from engine.models.moe import Experts, by_expert
from engine.models.routing import BiasedSoftmax, Law
from engine.models.sizes import FULL, Sizes
from engine.parallel.ranks import once

_MAX_BLOCKS = 4096


@dataclass(frozen=True, slots=True)
class ZeroComputeMixture:
    """Experts, and behind them some that cost nothing: they give back what they get. `router` is float32."""

    router: Linear
    law: Law
    experts: Experts
    num_experts: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, width] in the model's dtype to float32 [tokens, width]."""
        chosen, weights = self.law(self.router(x.float()))
        return self.experts.ranks.total(by_expert(x, chosen, weights, self._expert))

    def _expert(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        if number < self.num_experts:
            return self.experts.expert(number, rows)
        return once(rows, self.experts.ranks.share)


@dataclass(frozen=True, slots=True)
class SubLayer:
    attention_norm: RmsNorm
    attention: LatentAttention
    ffn_norm: RmsNorm
    ffn: FeedForward

    def attend(self, x: torch.Tensor, step: Pass) -> torch.Tensor:
        h, angles = self.attention_norm(x).to(step.dtype), step.angles[FULL]
        return x + self.attention(h, self.attention.lower(h, angles), angles, step.view)


@dataclass(frozen=True, slots=True)
class ShortcutBlock:
    """The experts take what the first feed-forward takes, and what they give is added behind the second: they
    can be computed while the rest goes on."""

    first: SubLayer
    second: SubLayer
    experts: ZeroComputeMixture

    def __call__(self, x: torch.Tensor, step: Pass) -> torch.Tensor:
        x = self.first.attend(x, step)
        h = self.first.ffn_norm(x).to(step.dtype)
        shortcut = self.experts(h)
        x = self.second.attend(x + self.first.ffn(h), step)
        return x + self.second.ffn(self.second.ffn_norm(x).to(step.dtype)) + shortcut


class LongcatFlash(Decoder):
    """See `Model`."""

    def __init__(self, weights: WeightSource, placement: Placement) -> None:
        fields, load = Fields(weights), Loader(weights, placement)
        sizes = _read_sizes(fields)
        latent = read_latent_sizes(fields, sizes.width, sizes.num_heads)
        fields.only("qk_head_dim", latent.head, latent.head)
        fields.only("head_dim", latent.rope, latent.rope)
        rotary, scale = read_latent_rope(fields, latent, placement.n_ctx, default_base=10_000_000.0)
        eps = fields.number("rms_norm_eps", 1e-5)
        layers = range(2 * sizes.num_layers)
        super().__init__(
            weights.architecture,
            fields,
            sizes,
            placement,
            needs=MemoryNeeds("kv", tuple(latent_rows(layer, latent, rotary) for layer in layers)),
            rotaries={FULL: rotary},
            ends=load_ends(load, fields, sizes, eps),
            blocks=[
                ShortcutBlock(
                    first=_sub_layer(load, fields, block, 0, latent, scale, eps),
                    second=_sub_layer(load, fields, block, 1, latent, scale, eps),
                    experts=_mixture(load, fields, f"model.layers.{block}.mlp", sizes.width),
                )
                for block in range(sizes.num_layers)
            ],
        )


def _read_sizes(fields: Fields) -> Sizes:
    """`num_layers` counts blocks. What heads are made of is in the sizes of latents."""
    fields.only("quantization_config", None)
    fields.only("hidden_act", "silu", "silu")
    fields.only("attention_method", "MLA", "MLA")
    fields.only("mla_scale_q_lora", True, True)
    fields.only("mla_scale_kv_lora", True, True)
    num_heads = fields.count("num_attention_heads")
    return Sizes(
        num_layers=fields.count("num_layers", most=_MAX_BLOCKS),
        width=fields.count("hidden_size"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=fields.count("qk_nope_head_dim") + fields.count("qk_rope_head_dim"),
        vocab_size=fields.count("vocab_size"),
        n_ctx_train=fields.count("max_position_embeddings"),
    )


def _sub_layer(
    load: Loader, fields: Fields, block: int, half: int, latent: LatentSizes, scale: float, eps: float
) -> SubLayer:
    prefix = f"model.layers.{block}"
    name = f"{prefix}.self_attn.{half}"
    check_bias(load, fields, f"{name}.kv_a_proj_with_mqa", False)
    inner = fields.count("ffn_hidden_size")
    return SubLayer(
        attention_norm=load.norm(f"{prefix}.input_layernorm.{half}", latent.width, eps),
        attention=load_latent_attention(
            load, name, 2 * block + half, latent, scale, gains=stretching(latent)
        ),
        ffn_norm=load.norm(f"{prefix}.post_attention_layernorm.{half}", latent.width, eps),
        ffn=hub_ffn(load, f"{prefix}.mlps.{half}", latent.width, inner, F.silu),
    )


def _mixture(load: Loader, fields: Fields, prefix: str, width: int) -> ZeroComputeMixture:
    fields.only("router_bias", False, False)
    fields.only("zero_expert_type", "identity", "identity")
    count, inner = fields.count("n_routed_experts", most=MAX_EXPERTS), fields.count("expert_ffn_hidden_size")
    total = count + fields.count("zero_expert_num", 0, least=0, most=MAX_EXPERTS)
    law = BiasedSoftmax(
        bias=load.exact(f"{prefix}.router.e_score_correction_bias", total),
        num_chosen=fields.count("moe_topk", most=total),
        scale=fields.number("routed_scaling_factor"),
    )
    return ZeroComputeMixture(
        router=Linear(load.exact(f"{prefix}.router.classifier.weight", total, width)),
        law=law,
        experts=hub_experts(load, f"{prefix}.experts", count, inner, width, F.silu),
        num_experts=count,
    )
