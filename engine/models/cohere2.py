"""Cohere 2 (Command R7B, Command A): attention and feed-forward side by side on one norm, windows in layers
that have RoPE, and no positions at all in those that see everything."""

from __future__ import annotations

import torch.nn.functional as F

from engine.cache.memory import WindowSpec
from engine.models.base import Placement, WeightSource
from engine.models.blocks import ParallelBlock
from engine.models.decoder import Decoder, Ends, grouped_needs
from engine.models.fields import Fields
from engine.models.hub_rope import read_rope
from engine.models.layers import LayerNorm
from engine.models.loading import Loader, check_bias, hub_attention, hub_ffn, hub_head, hub_prefix
from engine.models.sizes import FULL, SLIDING, Sizes, read_layer_types, read_sizes


class Cohere2(Decoder):
    """See `Model`."""

    def __init__(self, weights: WeightSource, placement: Placement) -> None:
        fields, load = Fields(weights), Loader(weights, placement)
        sizes = read_sizes(fields)
        fields.word("hidden_act", ("silu",), "silu")
        kinds = _layer_types(fields, sizes.num_layers)
        windows = {FULL: None, SLIDING: WindowSpec(fields.count("sliding_window"))}
        rotaries = {SLIDING: read_rope(fields, sizes.head_size, placement.n_ctx)}
        prefix = hub_prefix(load)
        embedding = load.tensor(f"{prefix}.embed_tokens.weight", sizes.vocab_size, sizes.width)
        super().__init__(
            weights.architecture,
            fields,
            sizes,
            placement,
            needs=grouped_needs(sizes, [(rotaries.get(kind), windows[kind]) for kind in kinds]),
            rotaries=rotaries,
            ends=Ends(
                embedding,
                _norm(load, fields, f"{prefix}.norm", sizes.width),
                hub_head(load, fields, sizes, embedding, tied=True),
                logit_scale=fields.number("logit_scale", 0.0625),
            ),
            blocks=[
                _block(load, fields, sizes, f"{prefix}.layers.{layer}", layer, kind)
                for layer, kind in enumerate(kinds)
            ],
        )


def _layer_types(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """Older files say how many layers apart those are that see everything."""
    if fields.has("layer_types"):
        return read_layer_types(fields, (SLIDING, FULL), (FULL,) * num_layers)
    every = fields.count("sliding_window_pattern", 4)
    return tuple(SLIDING if (layer + 1) % every else FULL for layer in range(num_layers))


def _block(load: Loader, fields: Fields, sizes: Sizes, prefix: str, layer: int, kind: str) -> ParallelBlock:
    check_bias(load, fields, f"{prefix}.self_attn.q_proj", False)
    scale, pairs = sizes.head_size**-0.5, sizes.head_size // 2
    return ParallelBlock(
        kind=kind,
        norm=_norm(load, fields, f"{prefix}.input_layernorm", sizes.width),
        attention=hub_attention(load, f"{prefix}.self_attn", layer, sizes, scale, pairs),
        ffn=hub_ffn(load, f"{prefix}.mlp", sizes.width, fields.count("intermediate_size"), F.silu),
    )


def _norm(load: Loader, fields: Fields, name: str, width: int) -> LayerNorm:
    return LayerNorm(load.exact(f"{name}.weight", width), None, fields.positive("layer_norm_eps", 1e-5))
