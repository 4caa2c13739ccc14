"""Gemma 3n, its text model: several residual streams, inputs of a layer's own, and last layers that read
rows of others."""

from __future__ import annotations

import torch

from engine.cache.memory import MemoryNeeds, PartNeed, View, WindowSpec, keys_and_values
from engine.models.altup import load_streams
from engine.models.base import Placement, WeightSource
from engine.models.decoder import Ends, Frame
from engine.models.fields import Fields
from engine.models.gemma2 import rounded_root
from engine.models.gemma3n_blocks import Gemma3nReader
from engine.models.gemma_layers import load_layer_inputs
from engine.models.hub_rope import read_rope
from engine.models.loading import Loader, hub_head, hub_prefix
from engine.models.reuse import read_sources
from engine.models.sizes import FULL, SLIDING, Sizes, read_layer_types, read_sizes
from engine.rope import Rotary


class Gemma3n(Frame):
    """See `Model`. `sources` has for each layer the one whose rows it reads."""

    def __init__(self, weights: WeightSource, placement: Placement) -> None:
        fields, load = Fields(weights), Loader(weights, placement)
        sizes = read_sizes(fields)
        fields.word("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
        every_fifth = tuple(SLIDING if (layer + 1) % 5 else FULL for layer in range(sizes.num_layers))
        kinds = read_layer_types(fields, (SLIDING, FULL), every_fifth)
        self.sources = read_sources(fields, kinds, default=15)
        rotaries = _rotaries(fields, sizes.head_size, placement.n_ctx)
        prefix, eps = hub_prefix(load), fields.positive("rms_norm_eps", 1e-6)
        embedding = load.tensor(f"{prefix}.embed_tokens.weight", sizes.vocab_size, sizes.width)
        super().__init__(
            weights.architecture,
            fields,
            sizes,
            placement,
            needs=_needs(fields, sizes, kinds, self.sources, rotaries),
            rotaries=rotaries,
            ends=Ends(
                embedding,
                load.norm(f"{prefix}.norm", sizes.width, eps),
                hub_head(load, fields, sizes, embedding, tied=True),
                embedding_scale=rounded_root(sizes.width, placement.dtype),
                softcap=fields.positive_or_null("final_logit_softcapping"),
            ),
        )
        read = Gemma3nReader(fields, load, sizes, prefix, eps)
        self._streams = load_streams(load, prefix, read.num_streams, sizes.width)
        self._layer_inputs = load_layer_inputs(load, fields, sizes, prefix, eps)
        self._blocks = tuple(read.block(layer, self.sources[layer], kind) for layer, kind in enumerate(kinds))

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, view: View, outputs: torch.Tensor
    ) -> torch.Tensor:
        step = self._pass(positions, view)
        x = self._ends.embed(tokens)
        given = self._layer_inputs(tokens, x)
        streams = self._streams.many(x)
        for layer, block in enumerate(self._blocks):
            streams = block(streams, given[layer], step)
        return self._ends.logits(self._streams.one(streams[:, outputs.to(x.device)]))


def _rotaries(fields: Fields, head_size: int, n_ctx: int) -> dict[str, Rotary]:
    if not fields.has("rope_parameters"):
        fields.only("rope_scaling", None)  # older files say bases alone
    return {
        FULL: read_rope(fields, head_size, n_ctx, FULL, 1_000_000.0),
        SLIDING: read_rope(fields, head_size, n_ctx, SLIDING, 10_000.0, base_field="rope_local_base_freq"),
    }


def _needs(
    fields: Fields,
    sizes: Sizes,
    kinds: tuple[str, ...],
    sources: tuple[int, ...],
    rotaries: dict[str, Rotary],
) -> MemoryNeeds:
    """Rows of the layers that have some of their own."""
    windows = {FULL: None, SLIDING: WindowSpec(fields.count("sliding_window", 512))}
    heads, size = sizes.num_kv_heads, sizes.head_size
    parts: list[PartNeed] = []
    for layer in sorted(set(sources)):
        kind = kinds[layer]
        parts += keys_and_values(layer, heads, size, size, rotaries[kind], windows[kind])
    return MemoryNeeds("iswa" if SLIDING in kinds else "kv", tuple(parts))
