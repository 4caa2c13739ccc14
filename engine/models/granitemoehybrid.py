"""Granite 4 (IBM): layers of Mamba-2 and of attention, as a rule without positions, each followed by experts
and a feed-forward that every token goes through; what a layer adds to the stream is multiplied."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.cache.memory import PartNeed, keys_and_values
from engine.linear import Linear
from engine.models.base import Placement, WeightSource
from engine.models.decoder import Block, Decoder, Ends
from engine.models.fields import Fields
from engine.models.hub_experts import divided_experts
from engine.models.hub_rope import read_rope
from engine.models.layers import FeedForward
from engine.models.loading import Loader, check_bias, gated, hub_attention, hub_head
from engine.models.moe import Experts
from engine.models.sizes import FULL, Sizes, read_sizes
from engine.models.ssm2 import load_gated_ssm2, read_ssm2_sizes
from engine.models.ssm_block import Attends, Feeding, FeedingBlock, Mixing, MixingBlock, needs_of
from engine.rope import Rotary

#: Words for a layer with attention, and for one with a state-space mixer: older files have the second ones.
_ATTENDING, _RECURRENT = (FULL, "attention"), ("linear_attention", "mamba")


@dataclass(frozen=True, slots=True)
class GraniteMoe:
    """The `num_chosen` experts of the largest logits, softmax over these, and a feed-forward beside them."""

    router: Linear
    num_chosen: int
    experts: Experts
    shared: FeedForward

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        logits, chosen = self.router(x).float().topk(self.num_chosen)
        return self.experts(x, chosen, logits.softmax(-1)) + self.shared(x)


class GraniteMoeHybrid(Decoder):
    """See `Model`."""

    def __init__(self, weights: WeightSource, placement: Placement) -> None:
        fields, load = Fields(weights), Loader(weights, placement)
        fields.only("hidden_act", "silu", "silu")
        sizes = read_sizes(fields)
        kinds = _layer_kinds(fields, sizes.num_layers)
        inner = read_ssm2_sizes(fields, fields.count("mamba_expand", 2) * sizes.width)
        rotary = _rotary(fields, sizes, placement.n_ctx)
        eps = fields.positive("rms_norm_eps", 1e-6)
        residual = fields.number("residual_multiplier", 1.0)
        embedding = load.tensor("model.embed_tokens.weight", sizes.vocab_size, sizes.width)
        parts: list[PartNeed] = []
        blocks: list[Block] = []
        for layer, kind in enumerate(kinds):
            prefix = f"model.layers.{layer}"
            if kind in _ATTENDING:
                parts += keys_and_values(layer, sizes.num_kv_heads, sizes.head_size, sizes.head_size, rotary)
            else:
                parts += inner.parts(layer)
            norm = load.norm(f"{prefix}.input_layernorm", sizes.width, eps)
            ffn_norm = load.norm(f"{prefix}.post_attention_layernorm", sizes.width, eps)
            mixing = (
                _attends(load, fields, sizes, layer, rotary)
                if kind in _ATTENDING
                else load_gated_ssm2(load, fields, f"{prefix}.mamba", layer, sizes.width, inner, eps)
            )
            blocks.append(MixingBlock(norm, mixing, residual))
            blocks.append(FeedingBlock(ffn_norm, _feeding(load, fields, prefix, sizes.width), residual))
        super().__init__(
            weights.architecture,
            fields,
            sizes,
            placement,
            needs=needs_of(parts),
            rotaries={} if rotary is None else {FULL: rotary},
            ends=Ends(
                embedding,
                load.norm("model.norm", sizes.width, eps),
                hub_head(load, fields, sizes, embedding, tied=False),
                embedding_scale=fields.number("embedding_multiplier", 1.0),
                logit_scale=1 / fields.positive("logits_scaling", 1.0),
            ),
            blocks=blocks,
        )


def _layer_kinds(fields: Fields, num_layers: int) -> tuple[str, ...]:
    if not fields.has("layer_types"):
        return _RECURRENT[:1] * num_layers
    return fields.words("layer_types", num_layers, (*_ATTENDING, *_RECURRENT))


def _rotary(fields: Fields, sizes: Sizes, n_ctx: int) -> Rotary | None:
    """None where layers with attention have no positions."""
    if fields.word("position_embedding_type", ("rope", "nope"), "nope") == "nope":
        return None
    return read_rope(fields, sizes.head_size, n_ctx)


def _attends(load: Loader, fields: Fields, sizes: Sizes, layer: int, rotary: Rotary | None) -> Mixing:
    prefix = f"model.layers.{layer}.self_attn"
    check_bias(load, fields, f"{prefix}.q_proj", False)
    scale = fields.number("attention_multiplier", 1.0)
    attention = hub_attention(load, prefix, layer, sizes, scale)
    return Attends(attention, None if rotary is None else FULL)


def _feeding(load: Loader, fields: Fields, prefix: str, width: int) -> Feeding:
    shared_inner = fields.count("shared_intermediate_size", 1024)
    both, down = (f"{prefix}.shared_mlp.input_linear",), f"{prefix}.shared_mlp.output_linear"
    shared = gated(load, both, down, width, shared_inner, F.silu)
    num_experts = fields.count("num_local_experts", 8, least=0)
    if num_experts == 0:
        return shared
    inner, prefix = fields.count("intermediate_size"), f"{prefix}.block_sparse_moe"
    return GraniteMoe(
        router=load.linear((f"{prefix}.router.layer",), (num_experts,), width),
        num_chosen=fields.count("num_experts_per_tok", 2, most=num_experts),
        experts=divided_experts(
            load,
            load.tensor(f"{prefix}.input_linear.weight", num_experts, 2 * inner, width),
            load.tensor(f"{prefix}.output_linear.weight", num_experts, width, inner),
            F.silu,
        ),
        shared=shared,
    )
