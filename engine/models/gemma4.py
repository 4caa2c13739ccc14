"""Gemma 4, its text model: layers that see everything have heads of another size and turn a share of them,
the last layers read rows of others, and some models have experts beside the feed-forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.cache.memory import MemoryNeeds, PartNeed, View, WindowSpec, keys_and_values
from engine.models.base import Placement, WeightSource
from engine.models.decoder import Ends, Frame
from engine.models.fields import Fields
from engine.models.gemma2 import rounded_root
from engine.models.gemma4_blocks import Gemma4Block, Gemma4Reader
from engine.models.gemma_layers import Heads, LayerInputs, load_layer_inputs
from engine.models.hub_rope import read_rope
from engine.models.loading import Loader, hub_head, hub_prefix
from engine.models.reuse import read_sources
from engine.models.sizes import FULL, SLIDING, Sizes, read_layer_types, read_sizes
from engine.rope import Rotary


@dataclass(frozen=True, slots=True)
class Gemma4Layout:
    """What differs from layer to layer. `sources` has for each layer the one whose rows it reads."""

    kinds: tuple[str, ...]
    heads: dict[str, Heads]
    sources: tuple[int, ...]
    windows: dict[str, WindowSpec | None]


class Gemma4(Frame):
    """See `Model`."""

    def __init__(self, weights: WeightSource, placement: Placement) -> None:
        fields, load = Fields(weights), Loader(weights, placement)
        sizes = read_sizes(fields)
        fields.word("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
        if fields.has("use_bidirectional_attention"):
            fields.only("use_bidirectional_attention", "vision")  # among the parts of images alone
        self.layout = layout = _layout(fields, sizes)
        rotaries = {
            kind: _rotary(fields, heads.size, placement.n_ctx, kind) for kind, heads in layout.heads.items()
        }
        prefix, eps = hub_prefix(load), fields.positive("rms_norm_eps", 1e-6)
        embedding = load.tensor(f"{prefix}.embed_tokens.weight", sizes.vocab_size, sizes.width)
        super().__init__(
            weights.architecture,
            fields,
            sizes,
            placement,
            needs=_needs(layout, rotaries),
            rotaries=rotaries,
            ends=Ends(
                embedding,
                load.norm(f"{prefix}.norm", sizes.width, eps),
                hub_head(load, fields, sizes, embedding, tied=True),
                embedding_scale=rounded_root(sizes.width, placement.dtype),
                softcap=fields.positive_or_null("final_logit_softcapping"),
            ),
        )
        read = Gemma4Reader(fields, load, sizes, prefix, eps)
        self._blocks: tuple[Gemma4Block, ...] = tuple(
            read.block(layer, layout.sources[layer], kind, layout.heads[kind])
            for layer, kind in enumerate(layout.kinds)
        )
        self._layer_inputs: LayerInputs | None = None
        if read.has_layer_inputs:
            self._layer_inputs = load_layer_inputs(load, fields, sizes, prefix, eps)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, view: View, outputs: torch.Tensor
    ) -> torch.Tensor:
        step = self._pass(positions, view)
        x = self._ends.embed(tokens)
        given = None if self._layer_inputs is None else self._layer_inputs(tokens, x)
        for layer, block in enumerate(self._blocks):
            x = block(x, None if given is None else given[layer], step)
        return self._ends.logits(x[outputs.to(x.device)])


def _layout(fields: Fields, sizes: Sizes) -> Gemma4Layout:
    last = sizes.num_layers - 1
    every_sixth = tuple(
        FULL if (layer + 1) % 6 == 0 or layer == last else SLIDING for layer in range(sizes.num_layers)
    )
    kinds = read_layer_types(fields, (SLIDING, FULL), every_sixth)
    if kinds[-1] != FULL:
        raise fields.refused("layer_types", f"{kinds[-1]} in the last layer")
    return Gemma4Layout(
        kinds=kinds,
        heads=_heads(fields, sizes, kinds),
        sources=read_sources(fields, kinds, default=0),
        windows={FULL: None, SLIDING: WindowSpec(fields.count("sliding_window", 512))},
    )


def _heads(fields: Fields, sizes: Sizes, kinds: tuple[str, ...]) -> dict[str, Heads]:
    """Of each kind of layer. Files say it for all layers of a kind, or layer by layer."""
    found: dict[str, Heads] = {}
    each = fields.section("per_layer_config") if fields.has("per_layer_config") else None
    for layer, kind in enumerate(kinds):
        heads = Heads(sizes.num_kv_heads, sizes.head_size)
        if each is not None:
            own = each.section(str(layer))
            size = own.count("head_dim", heads.size)
            heads = Heads(own.count("num_key_value_heads", heads.num_kv_heads), size)
        elif kind == FULL:
            count = heads.num_kv_heads
            if fields.flag("attention_k_eq_v", False):
                count = fields.count("num_global_key_value_heads", count)
            heads = Heads(count, fields.count("global_head_dim", 512))
        if sizes.num_heads % heads.num_kv_heads:
            raise fields.refused("num_key_value_heads", heads.num_kv_heads)
        if found.setdefault(kind, heads) != heads:
            raise fields.refused("per_layer_config", "layers of one kind with different heads")
    return found


def _rotary(fields: Fields, head_size: int, n_ctx: int, kind: str) -> Rotary:
    if not fields.has("rope_parameters"):
        raise fields.refused("rope_parameters", None)
    return read_rope(fields, head_size, n_ctx, kind)


def _needs(layout: Gemma4Layout, rotaries: dict[str, Rotary]) -> MemoryNeeds:
    """Rows of the layers that have some of their own."""
    parts: list[PartNeed] = []
    for layer in sorted(set(layout.sources)):
        kind = layout.kinds[layer]
        heads, window = layout.heads[kind], layout.windows[kind]
        parts += keys_and_values(layer, heads.num_kv_heads, heads.size, heads.size, rotaries[kind], window)
    return MemoryNeeds("iswa" if SLIDING in layout.kinds else "kv", tuple(parts))
