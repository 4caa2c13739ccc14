"""Falcon-H1 (Zuo et al. 2025, "Falcon-H1", section 2): attention and a Mamba-2 mixer side by side in every
layer, and a multiplier, fixed by the configuration, on nearly everything that is projected."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.cache.memory import MemoryNeeds, PartNeed, keys_and_values
from engine.models.base import Placement, WeightSource
from engine.models.decoder import Decoder, Ends, Pass
from engine.models.fields import Fields
from engine.models.hub_rope import read_rope
from engine.models.layers import Attention, FeedForward, RmsNorm
from engine.models.loading import Loader, check_bias, hub_attention, hub_ffn, hub_head
from engine.models.sizes import FULL, Sizes, read_sizes
from engine.models.ssm2 import (
    Gate,
    GatedNorm,
    NormThenGate,
    Ssm2Mixer,
    Ssm2Sizes,
    gate_only,
    load_ssm2,
    read_ssm2_sizes,
)


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Of what goes into and comes out of the two mixers and the feed-forward."""

    attention_in: float
    attention_out: float
    ssm_in: float
    ssm_out: float
    gate: float
    down: float

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x * self.gate)


@dataclass(frozen=True, slots=True)
class FalconH1Block:
    norm: RmsNorm
    attention: Attention
    mixer: Ssm2Mixer
    ffn_norm: RmsNorm
    ffn: FeedForward
    by: Multipliers

    def __call__(self, x: torch.Tensor, step: Pass) -> torch.Tensor:
        h, by = self.norm(x), self.by
        mixed = self.mixer((h * by.ssm_in).to(step.dtype), step).float()
        attended = self.attention((h * by.attention_in).to(step.dtype), step.angles[FULL], step.view).float()
        x = x + mixed * by.ssm_out + attended * by.attention_out
        return x + self.ffn(self.ffn_norm(x).to(step.dtype)).float() * by.down


class FalconH1(Decoder):
    """See `Model`."""

    def __init__(self, weights: WeightSource, placement: Placement) -> None:
        fields, load = Fields(weights), Loader(weights, placement)
        fields.only("hidden_act", "silu", "silu")
        sizes = read_sizes(fields)
        inner = _inner_sizes(fields, sizes.width)
        rotary = read_rope(fields, sizes.head_size, placement.n_ctx)
        eps = fields.positive("rms_norm_eps", 1e-5)
        embedding = load.tensor("model.embed_tokens.weight", sizes.vocab_size, sizes.width)
        parts: list[PartNeed] = []
        for layer in range(sizes.num_layers):
            parts += keys_and_values(layer, sizes.num_kv_heads, sizes.head_size, sizes.head_size, rotary)
            parts += inner.parts(layer)
        super().__init__(
            weights.architecture,
            fields,
            sizes,
            placement,
            needs=MemoryNeeds("hybrid", tuple(parts)),
            rotaries={FULL: rotary},
            ends=Ends(
                embedding,
                load.norm("model.final_layernorm", sizes.width, eps),
                hub_head(load, fields, sizes, embedding, tied=False),
                embedding_scale=fields.number("embedding_multiplier", 1.0),
                logit_scale=fields.number("lm_head_multiplier", 1.0),
            ),
            blocks=[_block(load, fields, sizes, inner, layer, eps) for layer in range(sizes.num_layers)],
        )


def _inner_sizes(fields: Fields, width: int) -> Ssm2Sizes:
    inner = fields.count("mamba_d_ssm", fields.count("mamba_expand", 2) * width)
    return read_ssm2_sizes(fields, inner)


def _block(
    load: Loader, fields: Fields, sizes: Sizes, inner: Ssm2Sizes, layer: int, eps: float
) -> FalconH1Block:
    prefix = f"model.layers.{layer}"
    width = sizes.width
    check_bias(load, fields, f"{prefix}.self_attn.q_proj", False)
    check_bias(load, fields, f"{prefix}.feed_forward.up_proj", False, "mlp_bias")
    check_bias(load, fields, f"{prefix}.mamba.in_proj", False, "mamba_proj_bias")
    check_bias(load, fields, f"{prefix}.mamba.out_proj", False, "projectors_bias")
    check_bias(load, fields, f"{prefix}.mamba.conv1d", True, "mamba_conv_bias")
    by = _multipliers(fields)
    # Keys are multiplied before they meet queries: it makes no difference to what scale that happens.
    scale = sizes.head_size**-0.5 * fields.number("key_multiplier", 1.0)
    gate, scales = _gate(load, fields, f"{prefix}.mamba", inner, eps), _scales(fields, inner)
    return FalconH1Block(
        norm=load.norm(f"{prefix}.input_layernorm", width, eps),
        attention=hub_attention(load, f"{prefix}.self_attn", layer, sizes, scale),
        mixer=load_ssm2(load, f"{prefix}.mamba", layer, width, inner, gate, scales),
        ffn_norm=load.norm(f"{prefix}.pre_ff_layernorm", width, eps),
        ffn=hub_ffn(load, f"{prefix}.feed_forward", width, fields.count("intermediate_size"), by.gated),
        by=by,
    )


def _multipliers(fields: Fields) -> Multipliers:
    gate, down = _several(fields, "mlp_multipliers", 2)
    return Multipliers(
        attention_in=fields.number("attention_in_multiplier", 1.0),
        attention_out=fields.number("attention_out_multiplier", 1.0),
        ssm_in=fields.number("ssm_in_multiplier", 1.0),
        ssm_out=fields.number("ssm_out_multiplier", 1.0),
        gate=gate,
        down=down,
    )


def _scales(fields: Fields, inner: Ssm2Sizes) -> torch.Tensor | None:
    """float32 [outputs of the mixer's projection]: of the gate, values, keys, queries and step sizes."""
    by = _several(fields, "ssm_multipliers", 5)
    if by == (1.0,) * 5:
        return None
    shared = inner.num_groups * inner.d_state
    counts = torch.tensor([inner.inner, inner.inner, shared, shared, inner.num_heads])
    return torch.tensor(by).repeat_interleave(counts)


def _several(fields: Fields, name: str, count: int) -> tuple[float, ...]:
    """Ones where the field is missing."""
    values = fields.numbers(name) if fields.has(name) else (1.0,) * count
    if len(values) != count:
        raise fields.refused(name, list(values))
    return values


def _gate(load: Loader, fields: Fields, prefix: str, inner: Ssm2Sizes, eps: float) -> Gate:
    if not fields.flag("mamba_rms_norm", False):
        return gate_only
    weight = load.exact(f"{prefix}.norm.weight", inner.inner)
    norm = NormThenGate if fields.flag("mamba_norm_before_gate", True) else GatedNorm
    return norm(weight, eps, inner.num_groups)
