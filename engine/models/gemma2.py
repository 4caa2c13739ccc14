"""Gemma 2: norms before and after each half of a block, every other layer with a sliding window, and soft
caps on the scores and on the logits (Gemma 2 technical report, section 2)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.cache.memory import WindowSpec
from engine.models.base import Placement, WeightSource
from engine.models.decoder import Decoder, Ends, Pass, grouped_needs
from engine.models.fields import Fields
from engine.models.gemma3 import gelu
from engine.models.hub_rope import read_rope
from engine.models.layers import Attention, FeedForward, RmsNorm
from engine.models.loading import Loader, check_bias, hub_attention, hub_ffn, hub_head
from engine.models.sizes import FULL, SLIDING, Sizes, read_layer_types, read_sizes


@dataclass(frozen=True, slots=True)
class Gemma2Block:
    kind: str
    attention_norm: RmsNorm
    attention: Attention
    after_attention_norm: RmsNorm
    ffn_norm: RmsNorm
    ffn: FeedForward
    after_ffn_norm: RmsNorm

    def __call__(self, x: torch.Tensor, step: Pass) -> torch.Tensor:
        h = self.attention_norm(x).to(step.dtype)
        attended = self.attention(h, step.angles[self.kind], step.view)
        x = x + self.after_attention_norm(attended.float())
        return x + self.after_ffn_norm(self.ffn(self.ffn_norm(x).to(step.dtype)).float())


class Gemma2(Decoder):
    """See `Model`."""

    def __init__(self, weights: WeightSource, placement: Placement) -> None:
        fields, load = Fields(weights), Loader(weights, placement)
        sizes = read_sizes(fields)
        fields.word("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
        if fields.has("use_bidirectional_attention"):
            fields.only("use_bidirectional_attention", False)
        alternating = tuple((SLIDING, FULL)[layer % 2] for layer in range(sizes.num_layers))
        kinds = read_layer_types(fields, (SLIDING, FULL), alternating)
        windows = {FULL: None, SLIDING: WindowSpec(fields.count("sliding_window"))}
        rotary = read_rope(fields, sizes.head_size, placement.n_ctx)
        embedding = load.tensor("model.embed_tokens.weight", sizes.vocab_size, sizes.width)
        super().__init__(
            weights.architecture,
            fields,
            sizes,
            placement,
            needs=grouped_needs(sizes, [(rotary, windows[kind]) for kind in kinds]),
            rotaries={SLIDING: rotary, FULL: rotary},
            ends=Ends(
                embedding,
                load.norm_from_one("model.norm", sizes.width, fields.positive("rms_norm_eps", 1e-6)),
                hub_head(load, fields, sizes, embedding, tied=True),
                embedding_scale=rounded_root(sizes.width, placement.dtype),
                softcap=fields.positive_or_null("final_logit_softcapping"),
            ),
            blocks=[_block(load, fields, sizes, layer, kind) for layer, kind in enumerate(kinds)],
        )


def rounded_root(width: int, dtype: torch.dtype) -> float:
    """The square root of a width, rounded to the model's dtype as the model was trained."""
    return float(torch.tensor(width**0.5, dtype=dtype))


def _block(load: Loader, fields: Fields, sizes: Sizes, layer: int, kind: str) -> Gemma2Block:
    prefix = f"model.layers.{layer}"
    eps = fields.positive("rms_norm_eps", 1e-6)
    check_bias(load, fields, f"{prefix}.self_attn.q_proj", False)
    scale = fields.positive("query_pre_attn_scalar", 256.0) ** -0.5
    attention = hub_attention(load, f"{prefix}.self_attn", layer, sizes, scale)

    def norm(name: str) -> RmsNorm:
        return load.norm_from_one(f"{prefix}.{name}", sizes.width, eps)

    return Gemma2Block(
        kind=kind,
        attention_norm=norm("input_layernorm"),
        attention=replace(attention, softcap=fields.positive_or_null("attn_logit_softcapping")),
        after_attention_norm=norm("post_attention_layernorm"),
        ffn_norm=norm("pre_feedforward_layernorm"),
        ffn=hub_ffn(load, f"{prefix}.mlp", sizes.width, fields.count("intermediate_size"), gelu),
        after_ffn_norm=norm("post_feedforward_layernorm"),
    )
