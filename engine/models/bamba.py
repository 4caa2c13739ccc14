"""Bamba: layers of Mamba-2 with a few of attention among them, where RoPE turns half of every head; a gated
feed-forward follows each."""

from __future__ import annotations

import torch.nn.functional as F

from engine.cache.memory import PartNeed, keys_and_values
from engine.models.base import Placement, WeightSource
from engine.models.decoder import Block, Decoder, Ends
from engine.models.fields import Fields
from engine.models.hub_rope import read_rope
from engine.models.loading import Loader, check_bias, hub_attention, hub_ffn, hub_head
from engine.models.sizes import FULL, Sizes, read_sizes
from engine.models.ssm2 import Ssm2Sizes, load_gated_ssm2, read_ssm2_sizes
from engine.models.ssm_block import Attends, FeedingBlock, MixingBlock, needs_of


class Bamba(Decoder):
    """See `Model`."""

    def __init__(self, weights: WeightSource, placement: Placement) -> None:
        fields, load = Fields(weights), Loader(weights, placement)
        fields.only("hidden_act", "silu", "silu")
        sizes = read_sizes(fields)
        inner = read_ssm2_sizes(fields, fields.count("mamba_expand", 2) * sizes.width)
        attending = _attending(fields, sizes.num_layers)
        rotary = read_rope(fields, sizes.head_size, placement.n_ctx, default_share=0.5)
        eps = fields.positive("rms_norm_eps", 1e-5)
        embedding = load.tensor("model.embed_tokens.weight", sizes.vocab_size, sizes.width)
        parts: list[PartNeed] = []
        blocks: list[Block] = []
        for layer in range(sizes.num_layers):
            if layer in attending:
                parts += keys_and_values(layer, sizes.num_kv_heads, sizes.head_size, sizes.head_size, rotary)
                mixing = _attention(load, fields, sizes, layer, eps)
            else:
                parts += inner.parts(layer)
                mixing = _mixer(load, fields, sizes, inner, layer, eps)
            blocks += (mixing, _ffn(load, fields, sizes, layer, eps))
        super().__init__(
            weights.architecture,
            fields,
            sizes,
            placement,
            needs=needs_of(parts),
            rotaries={FULL: rotary},
            ends=Ends(
                embedding,
                load.norm("model.final_layernorm", sizes.width, eps),
                hub_head(load, fields, sizes, embedding, tied=False),
            ),
            blocks=blocks,
        )


def _attending(fields: Fields, num_layers: int) -> frozenset[int]:
    """The layers that have attention."""
    if not fields.has("attn_layer_indices"):
        return frozenset()
    return frozenset(fields.counts("attn_layer_indices", most=num_layers - 1))


def _attention(load: Loader, fields: Fields, sizes: Sizes, layer: int, eps: float) -> MixingBlock:
    prefix = f"model.layers.{layer}"
    check_bias(load, fields, f"{prefix}.self_attn.q_proj", False)
    attention = hub_attention(load, f"{prefix}.self_attn", layer, sizes, sizes.head_size**-0.5)
    return MixingBlock(load.norm(f"{prefix}.input_layernorm", sizes.width, eps), Attends(attention, FULL))


def _mixer(
    load: Loader, fields: Fields, sizes: Sizes, inner: Ssm2Sizes, layer: int, eps: float
) -> MixingBlock:
    prefix = f"model.layers.{layer}"
    mixer = load_gated_ssm2(load, fields, f"{prefix}.mamba", layer, sizes.width, inner, eps)
    return MixingBlock(load.norm(f"{prefix}.input_layernorm", sizes.width, eps), mixer)


def _ffn(load: Loader, fields: Fields, sizes: Sizes, layer: int, eps: float) -> FeedingBlock:
    prefix = f"model.layers.{layer}"
    check_bias(load, fields, f"{prefix}.feed_forward.up_proj", False, "mlp_bias")
    inner = fields.count("intermediate_size")
    ffn = hub_ffn(load, f"{prefix}.feed_forward", sizes.width, inner, F.silu)
    return FeedingBlock(load.norm(f"{prefix}.pre_ff_layernorm", sizes.width, eps), ffn)
