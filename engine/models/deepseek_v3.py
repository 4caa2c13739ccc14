"""DeepSeek-V3: latent attention, and from some layer on mixtures of experts that a bias balances
(DeepSeek-V3 technical report, section 2.1). The layers behind the last, which predict further tokens, are in
`deepseek_v3_mtp.py`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.cache.memory import MemoryNeeds, RowsSpec
from engine.models.base import Placement, WeightSource
from engine.models.decoder import Decoder
from engine.models.fields import Fields
from engine.models.loading import Loader, check_bias
from engine.models.mla import (
    LatentSizes,
    latent_rows,
    load_latent_attention,
    read_latent_rope,
    read_latent_sizes,
)
from engine.models.mla_blocks import LatentBlock, load_block, load_ends
from engine.models.mla_ffn import LoadLaw, check_groups, load_biased_sigmoid, load_ffn, read_kinds
from engine.models.sizes import FULL, Sizes, read_sizes
from engine.rope import Rotary


@dataclass(frozen=True, slots=True)
class LatentLayers:
    """What all layers of a file have in common, and from where each is loaded. `law` says which experts a
    token goes to."""

    load: Loader
    fields: Fields
    sizes: Sizes
    latent: LatentSizes
    rotary: Rotary
    scale: float
    eps: float
    law: LoadLaw

    @classmethod
    def read(cls, weights: WeightSource, placement: Placement, law: LoadLaw) -> LatentLayers:
        """Raises WeightsRefused."""
        fields = Fields(weights)
        sizes = read_sizes(fields)
        fields.only("mlp_bias", False, False)
        latent = read_latent_sizes(fields, sizes.width, sizes.num_heads)
        latent = replace(latent, pairs=fields.flag("rope_interleave", True))
        rotary, scale = read_latent_rope(fields, latent, placement.n_ctx)
        eps = fields.number("rms_norm_eps", 1e-6)
        return cls(Loader(weights, placement), fields, sizes, latent, rotary, scale, eps, law)

    def rows(self, layer: int) -> RowsSpec:
        return latent_rows(layer, self.latent, self.rotary)

    def block(self, layer: int, kind: str) -> LatentBlock:
        """`kind` is that of the second half. Raises WeightsRefused."""
        load, fields, width, prefix = self.load, self.fields, self.sizes.width, f"model.layers.{layer}"
        check_bias(load, fields, f"{prefix}.self_attn.kv_a_proj_with_mqa", False)
        attention = load_latent_attention(load, f"{prefix}.self_attn", layer, self.latent, self.scale)
        ffn = load_ffn(load, fields, f"{prefix}.mlp", width, kind, self.law)
        return load_block(load, prefix, FULL, width, self.eps, attention, ffn)


class LatentDecoder(Decoder):
    """See `Model`. Every layer sees everything."""

    def __init__(self, weights: WeightSource, placement: Placement, law: LoadLaw) -> None:
        layers = LatentLayers.read(weights, placement, law)
        sizes, fields = layers.sizes, layers.fields
        kinds = read_kinds(fields, sizes.num_layers)
        super().__init__(
            weights.architecture,
            fields,
            sizes,
            placement,
            needs=MemoryNeeds("kv", tuple(layers.rows(layer) for layer in range(sizes.num_layers))),
            rotaries={FULL: layers.rotary},
            ends=load_ends(layers.load, fields, sizes, layers.eps),
            blocks=[layers.block(layer, kind) for layer, kind in enumerate(kinds)],
        )


class DeepSeekV3(LatentDecoder):
    """See `Model`."""

    def __init__(self, weights: WeightSource, placement: Placement) -> None:
        check_groups(Fields(weights))
        super().__init__(weights, placement, load_biased_sigmoid)
