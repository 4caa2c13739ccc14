"""LFM2 (Liquid AI, technical report 2025): short convolutions between two gates, and a little attention.

A stack of convolutions alone keeps no rows: its memory is a recurrent one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.cache.memory import MemoryNeeds, PartNeed, PointSpec, View, keys_and_values
from engine.linear import Linear
from engine.models.base import Placement, WeightSource
from engine.models.conv import ShortConv, load_conv
from engine.models.decoder import Decoder, Ends, Pass
from engine.models.fields import Fields
from engine.models.hub_rope import read_rope
from engine.models.layers import Attention, FeedForward, HeadNorm, RmsNorm
from engine.models.loading import Loader, check_bias, gated, hub_head, hub_out, hub_prefix, hub_qkv, local
from engine.models.sizes import FULL, Sizes, read_layer_types, read_sizes

#: the other word of layer_types, and the name of the point state
CONV, STATE = "conv", "lfm2.conv"


@dataclass(frozen=True, slots=True)
class GatedConv:
    """out(c * conv(b * x)); `inputs` has the rows of b, c and x."""

    layer: int
    inputs: Linear
    conv: ShortConv
    out: Linear

    def __call__(self, x: torch.Tensor, view: View) -> torch.Tensor:
        """`x` [tokens, width] in the model's dtype; the same shape comes back."""
        b, c, inner = self.inputs(x).float().view(len(view.segments), -1, 3 * x.shape[1]).chunk(3, dim=-1)
        mixed, tails = self.conv(b * inner, view.point(STATE, self.layer), view.newest)
        view.set_point(STATE, self.layer, tails)
        return self.out((c * mixed).view(x.shape).to(x.dtype))


@dataclass(frozen=True, slots=True)
class Lfm2Block:
    mixer_norm: RmsNorm
    mixer: Attention | GatedConv
    ffn_norm: RmsNorm
    ffn: FeedForward

    def __call__(self, x: torch.Tensor, step: Pass) -> torch.Tensor:
        h = self.mixer_norm(x).to(step.dtype)
        if isinstance(self.mixer, GatedConv):
            x = x + self.mixer(h, step.view)
        else:
            x = x + self.mixer(h, step.angles[FULL], step.view)
        return x + self.ffn(self.ffn_norm(x).to(step.dtype))


class Lfm2(Decoder):
    """See `Model`."""

    def __init__(self, weights: WeightSource, placement: Placement) -> None:
        fields, load = Fields(weights), Loader(weights, placement)
        sizes = read_sizes(fields)
        kinds = _read_kinds(fields, sizes.num_layers)
        kernel, inner = fields.count("conv_L_cache", least=2, most=2**16), _ffn_width(fields)
        rotary = read_rope(fields, sizes.head_size, placement.n_ctx, default_base=1_000_000.0)
        eps, prefix = fields.number("norm_eps", 1e-5), hub_prefix(load)
        embedding = load.tensor(f"{prefix}.embed_tokens.weight", sizes.vocab_size, sizes.width)
        parts: list[PartNeed] = []
        blocks = []
        for layer, kind in enumerate(kinds):
            name, size = f"{prefix}.layers.{layer}", sizes.head_size
            if kind == FULL:
                parts += keys_and_values(layer, sizes.num_kv_heads, size, size, rotary)
                mixer: Attention | GatedConv = _attention(load, f"{name}.self_attn", layer, sizes, eps)
            else:
                parts.append(PointSpec(STATE, layer, (kernel - 1, sizes.width)))
                mixer = _gated_conv(load, fields, f"{name}.conv", layer, sizes.width, kernel)
            blocks.append(
                Lfm2Block(
                    mixer_norm=load.norm(f"{name}.operator_norm", sizes.width, eps),
                    mixer=mixer,
                    ffn_norm=load.norm(f"{name}.ffn_norm", sizes.width, eps),
                    ffn=_ffn(load, f"{name}.feed_forward", sizes.width, inner),
                )
            )
        super().__init__(
            weights.architecture,
            fields,
            sizes,
            placement,
            needs=MemoryNeeds("hybrid" if FULL in kinds else "recurrent", tuple(parts)),
            rotaries={FULL: rotary},
            ends=Ends(
                embedding,
                load.norm(f"{prefix}.embedding_norm", sizes.width, eps),
                hub_head(load, fields, sizes, embedding, tied=fields.flag("tie_embedding", True)),
            ),
            blocks=blocks,
        )


def _read_kinds(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """FULL or CONV of each layer: by name, or by numbers of those with attention. Raises WeightsRefused where
    there is no convolution."""
    default = (FULL,) * num_layers
    if fields.has("full_attn_idxs"):
        full = fields.counts("full_attn_idxs", most=num_layers - 1)
        default = tuple(FULL if layer in full else CONV for layer in range(num_layers))
    kinds = read_layer_types(fields, (CONV, FULL), default)
    if CONV not in kinds:
        raise fields.refused("layer_types", " ".join(kinds))
    return kinds


def _ffn_width(fields: Fields) -> int:
    """What the configuration says, or two thirds of it times a number, rounded up to a multiple."""
    width = fields.count("block_ff_dim") if fields.has("block_ff_dim") else fields.count("intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return width
    width = int(fields.number("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
    multiple = fields.count("block_multiple_of", 256)
    return (width + multiple - 1) // multiple * multiple


def _attention(load: Loader, prefix: str, layer: int, sizes: Sizes, eps: float) -> Attention:
    mine = local(load, sizes)
    q_norm = load.exact(f"{prefix}.q_layernorm.weight", sizes.head_size).expand(mine.num_heads, -1)
    k_norm = load.exact(f"{prefix}.k_layernorm.weight", sizes.head_size).expand(mine.num_kv_heads, -1)
    return Attention(
        layer=layer,
        qkv=hub_qkv(load, prefix, sizes),
        out=hub_out(load, f"{prefix}.out_proj", sizes),
        num_heads=mine.num_heads,
        num_kv_heads=mine.num_kv_heads,
        head_size=sizes.head_size,
        head_size_v=sizes.head_size,
        scale=sizes.head_size**-0.5,
        norm=HeadNorm(torch.cat((q_norm, k_norm)), eps),
    )


def _gated_conv(load: Loader, fields: Fields, prefix: str, layer: int, width: int, kernel: int) -> GatedConv:
    check_bias(load, fields, f"{prefix}.in_proj", False, "conv_bias")
    return GatedConv(
        layer=layer,
        inputs=load.linear((f"{prefix}.in_proj",), (3 * width,), width),
        conv=load_conv(load, f"{prefix}.conv", width, kernel),
        out=load.linear((f"{prefix}.out_proj",), (width,), width),
    )


def _ffn(load: Loader, prefix: str, width: int, inner: int) -> FeedForward:
    return gated(load, (f"{prefix}.w1", f"{prefix}.w3"), f"{prefix}.w2", width, inner, F.silu)
