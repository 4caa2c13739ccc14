"""Jamba (Lieber et al. 2024, "Jamba", section 2): one layer in several has attention, without positions, the
others are Mamba with norms inside; one feed-forward in several is a mixture of experts."""

from __future__ import annotations

import math

import torch.nn.functional as F

from engine.cache.memory import PartNeed, keys_and_values
from engine.linear import Linear
from engine.models.base import Placement, WeightSource
from engine.models.decoder import Block, Decoder, Ends
from engine.models.fields import Fields
from engine.models.hub_experts import hub_experts
from engine.models.loading import Loader, check_bias, hub_attention, hub_ffn, hub_head
from engine.models.routing import Groups, Softmax
from engine.models.sizes import Sizes, read_sizes
from engine.models.ssm1 import Ssm1Mixer, Ssm1Sizes, load_ssm1
from engine.models.ssm_block import Attends, Feeding, FeedingBlock, MixingBlock, Routed, needs_of


class Jamba(Decoder):
    """See `Model`."""

    def __init__(self, weights: WeightSource, placement: Placement) -> None:
        fields, load = Fields(weights), Loader(weights, placement)
        fields.only("hidden_act", "silu", "silu")
        fields.only("sliding_window", None)
        fields.only("mamba_inner_layernorms", True, True)
        sizes = read_sizes(fields)
        inner = Ssm1Sizes(
            channels=fields.count("mamba_expand", 2) * sizes.width,
            d_state=fields.count("mamba_d_state", 16),
            rank=fields.count_or_auto("mamba_dt_rank", math.ceil(sizes.width / 16)),
            kernel=fields.count("mamba_d_conv", 4, least=2),
        )
        eps = fields.positive("rms_norm_eps", 1e-6)
        attending = _layers(fields, sizes.num_layers, "attn_layer", 8, 4)
        routed = _layers(fields, sizes.num_layers, "expert_layer", 2, 1)
        if fields.count("num_experts", 16) == 1:
            routed = frozenset()
        embedding = load.tensor("model.embed_tokens.weight", sizes.vocab_size, sizes.width)
        parts: list[PartNeed] = []
        blocks: list[Block] = []
        for layer in range(sizes.num_layers):
            prefix = f"model.layers.{layer}"
            norm = load.norm(f"{prefix}.input_layernorm", sizes.width, eps)
            ffn_norm = load.norm(f"{prefix}.pre_ff_layernorm", sizes.width, eps)
            if layer in attending:
                parts += keys_and_values(layer, sizes.num_kv_heads, sizes.head_size, sizes.head_size, None)
                blocks.append(MixingBlock(norm, _attends(load, sizes, layer)))
            else:
                parts += inner.parts(layer)
                blocks.append(MixingBlock(norm, _mixer(load, fields, sizes.width, inner, layer, eps)))
            blocks.append(FeedingBlock(ffn_norm, _feeding(load, fields, sizes.width, layer, routed)))
        super().__init__(
            weights.architecture,
            fields,
            sizes,
            placement,
            needs=needs_of(parts),
            rotaries={},
            ends=Ends(
                embedding,
                load.norm("model.final_layernorm", sizes.width, eps),
                hub_head(load, fields, sizes, embedding, tied=False),
            ),
            blocks=blocks,
        )


def _layers(fields: Fields, num_layers: int, name: str, period: int, offset: int) -> frozenset[int]:
    """One layer in every `NAME_period`, the `NAME_offset`-th of them counted from 0."""
    period = fields.count(f"{name}_period", period)
    offset = fields.count(f"{name}_offset", offset, least=0, most=period - 1)
    return frozenset(range(offset, num_layers, period))


def _attends(load: Loader, sizes: Sizes, layer: int) -> Attends:
    prefix = f"model.layers.{layer}.self_attn"
    return Attends(hub_attention(load, prefix, layer, sizes, sizes.head_size**-0.5), None)


def _mixer(load: Loader, fields: Fields, width: int, inner: Ssm1Sizes, layer: int, eps: float) -> Ssm1Mixer:
    prefix = f"model.layers.{layer}.mamba"
    check_bias(load, fields, f"{prefix}.in_proj", False, "mamba_proj_bias")
    check_bias(load, fields, f"{prefix}.conv1d", True, "mamba_conv_bias")
    dt, b, c = (
        load.norm(f"{prefix}.{name}_layernorm", size, eps)
        for name, size in zip(("dt", "b", "c"), inner.shared, strict=True)
    )
    return load_ssm1(load, prefix, layer, width, inner, (dt, b, c))


def _feeding(load: Loader, fields: Fields, width: int, layer: int, routed: frozenset[int]) -> Feeding:
    prefix, inner = f"model.layers.{layer}.feed_forward", fields.count("intermediate_size")
    if layer not in routed:
        return hub_ffn(load, prefix, width, inner, F.silu)
    count = fields.count("num_experts", 16)
    return Routed(
        router=Linear(load.tensor(f"{prefix}.router.weight", count, width)),
        law=Softmax(Groups(), fields.count("num_experts_per_tok", 2, most=count), 1.0),
        experts=hub_experts(load, f"{prefix}.experts", count, inner, width, F.silu),
    )
