"""Phi-1 and Phi-2: attention and a plain feed-forward side by side on one norm, biases everywhere, half of
each head turned."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.linear import Linear
from engine.models.base import Placement, WeightSource
from engine.models.blocks import ParallelBlock
from engine.models.decoder import Decoder, Ends, grouped_needs
from engine.models.fields import Fields
from engine.models.gemma3 import gelu
from engine.models.hub_rope import read_rope
from engine.models.layers import Attention, LayerNorm, Projection
from engine.models.loading import Loader, hub_out, hub_qkv, local, output_matrix
from engine.models.sizes import FULL, Sizes, read_sizes
from engine.parallel.share import values_of


@dataclass(frozen=True, slots=True)
class HeadLayerNorm:
    """LayerNorm over each head. Weight and bias are [heads + kv heads, head size]: q's repeated, then k's."""

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float

    def __call__(self, qk: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(qk, qk.shape[-1:], eps=self.eps) * self.weight + self.bias


@dataclass(frozen=True, slots=True)
class PlainFeedForward:
    """down(gelu(up x))."""

    up: Linear
    down: Projection

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(gelu(self.up(x)))


class Phi(Decoder):
    """See `Model`."""

    def __init__(self, weights: WeightSource, placement: Placement) -> None:
        fields, load = Fields(weights), Loader(weights, placement)
        sizes = read_sizes(fields)
        fields.word("hidden_act", ("gelu_new", "gelu_pytorch_tanh"), "gelu_new")
        fields.only("tie_word_embeddings", False, False)
        rotary = read_rope(fields, sizes.head_size, placement.n_ctx, default_share=0.5)
        blocks = [_block(load, fields, sizes, layer) for layer in range(sizes.num_layers)]
        super().__init__(
            weights.architecture,
            fields,
            sizes,
            placement,
            needs=grouped_needs(sizes, [(rotary, None)] * sizes.num_layers),
            rotaries={FULL: rotary},
            ends=Ends(
                load.tensor("model.embed_tokens.weight", sizes.vocab_size, sizes.width),
                _norm(load, fields, "model.final_layernorm", sizes.width),
                output_matrix(load, "lm_head", sizes.vocab_size, sizes.width),
            ),
            blocks=blocks,
        )


def _block(load: Loader, fields: Fields, sizes: Sizes, layer: int) -> ParallelBlock:
    width, inner, prefix = sizes.width, fields.count("intermediate_size"), f"model.layers.{layer}"
    mine = local(load, sizes)
    attention = Attention(
        layer=layer,
        qkv=hub_qkv(load, f"{prefix}.self_attn", sizes),
        out=hub_out(load, f"{prefix}.self_attn.dense", sizes),
        num_heads=mine.num_heads,
        num_kv_heads=mine.num_kv_heads,
        head_size=sizes.head_size,
        head_size_v=sizes.head_size,
        scale=sizes.head_size**-0.5,
        norm=_head_norm(load, fields, mine, f"{prefix}.self_attn"),
    )
    columns = values_of(load.share.columns(inner), 1)
    ffn = PlainFeedForward(
        up=load.linear((f"{prefix}.mlp.fc1",), (inner,), width, (columns,)),
        down=load.summed(f"{prefix}.mlp.fc2", width, inner, columns),
    )
    return ParallelBlock(FULL, _norm(load, fields, f"{prefix}.input_layernorm", width), attention, ffn)


def _norm(load: Loader, fields: Fields, name: str, width: int) -> LayerNorm:
    eps = fields.positive("layer_norm_eps", 1e-5)
    return LayerNorm(load.exact(f"{name}.weight", width), load.exact(f"{name}.bias", width), eps)


def _head_norm(load: Loader, fields: Fields, sizes: Sizes, prefix: str) -> HeadLayerNorm | None:
    if not fields.flag("qk_layernorm", False):
        return None

    def both(name: str) -> torch.Tensor:
        q = load.exact(f"{prefix}.q_layernorm.{name}", sizes.head_size).expand(sizes.num_heads, -1)
        k = load.exact(f"{prefix}.k_layernorm.{name}", sizes.head_size).expand(sizes.num_kv_heads, -1)
        return torch.cat((q, k))

    return HeadLayerNorm(both("weight"), both("bias"), fields.positive("layer_norm_eps", 1e-5))
