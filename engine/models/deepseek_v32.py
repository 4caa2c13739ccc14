"""DeepSeek-V3.2: DeepSeek-V3, of which each layer attends to the rows that an indexer chooses
(DeepSeek-V3.2-Exp technical report, section 2.1).

RoPE of the attention is of consecutive values, that of the indexer of halves.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.cache.memory import MemoryNeeds, PartNeed
from engine.models.base import Placement, WeightSource
from engine.models.decoder import Decoder
from engine.models.fields import Fields
from engine.models.loading import Loader, check_bias
from engine.models.mla import latent_rows, load_latent_attention, read_latent_rope, read_latent_sizes
from engine.models.mla_blocks import IndexedRun, LatentBlock, load_block, load_ends
from engine.models.mla_ffn import check_groups, load_biased_sigmoid, load_ffn, read_kinds
from engine.models.mla_indexer import INDEXED, index_rows, load_indexer, read_index_sizes
from engine.models.sizes import FULL, read_layer_types, read_sizes


class IndexedDecoder(Decoder):
    """See `Model`. `leaders` are the layers that have an indexer, the first layer among them; those between
    attend to what the last of them chose. `pairs` says whether RoPE of the indexers is of consecutive values.
    """

    def __init__(
        self,
        weights: WeightSource,
        placement: Placement,
        fields: Fields,
        leaders: Sequence[int],
        pairs: bool,
        eps: float,
    ) -> None:
        load = Loader(weights, placement)
        sizes = read_sizes(fields)
        read_layer_types(fields, (INDEXED,), (INDEXED,) * sizes.num_layers)
        fields.only("mlp_bias", False, False)
        fields.only("rope_interleave", True, True)
        latent = read_latent_sizes(fields, sizes.width, sizes.num_heads)
        index = read_index_sizes(fields, latent, pairs)
        rotary, scale = read_latent_rope(fields, latent, placement.n_ctx)
        kinds = read_kinds(fields, sizes.num_layers)

        def block(layer: int) -> LatentBlock:
            prefix = f"model.layers.{layer}"
            check_bias(load, fields, f"{prefix}.self_attn.kv_a_proj_with_mqa", False)
            attention = load_latent_attention(load, f"{prefix}.self_attn", layer, latent, scale)
            ffn = load_ffn(load, fields, f"{prefix}.mlp", sizes.width, kinds[layer], load_biased_sigmoid)
            return load_block(load, prefix, FULL, sizes.width, eps, attention, ffn)

        def run(leader: int, stop: int) -> IndexedRun:
            prefix = f"model.layers.{leader}.self_attn.indexer"
            indexer = load_indexer(load, prefix, leader, index)
            return IndexedRun(
                indexer, block(leader), tuple(block(layer) for layer in range(leader + 1, stop))
            )

        parts: list[PartNeed] = [latent_rows(layer, latent, rotary) for layer in range(sizes.num_layers)]
        parts += [index_rows(layer, index, rotary) for layer in leaders]
        super().__init__(
            weights.architecture,
            fields,
            sizes,
            placement,
            needs=MemoryNeeds("dsa", tuple(parts)),
            rotaries={FULL: rotary},
            ends=load_ends(load, fields, sizes, eps),
            blocks=[
                run(leader, stop)
                for leader, stop in zip(leaders, [*leaders[1:], sizes.num_layers], strict=True)
            ],
        )


class DeepSeekV32(IndexedDecoder):
    """See `Model`."""

    def __init__(self, weights: WeightSource, placement: Placement) -> None:
        fields = Fields(weights)
        check_groups(fields)
        layers, eps = range(read_sizes(fields).num_layers), fields.number("rms_norm_eps", 1e-6)
        super().__init__(weights, placement, fields, layers, pairs=False, eps=eps)
