"""DeepSeek-V3: latent attention, and from some layer on mixtures of experts that a bias balances
(DeepSeek-V3 technical report, section 2.1). The layers behind the last, which predict further tokens, are not
read."""

from __future__ import annotations

from dataclasses import replace

from engine.cache.memory import MemoryNeeds
from engine.models.base import Placement, WeightSource
from engine.models.decoder import Decoder
from engine.models.fields import Fields
from engine.models.loading import Loader, check_bias
from engine.models.mla import latent_rows, load_latent_attention, read_latent_rope, read_latent_sizes
from engine.models.mla_blocks import LatentBlock, load_block, load_ends
from engine.models.mla_ffn import LoadLaw, check_groups, load_biased_sigmoid, load_ffn, read_kinds
from engine.models.sizes import FULL, read_sizes


class LatentDecoder(Decoder):
    """See `Model`. Every layer sees everything; `law` says which experts a token goes to."""

    def __init__(self, weights: WeightSource, placement: Placement, law: LoadLaw) -> None:
        fields, load = Fields(weights), Loader(weights, placement)
        sizes = read_sizes(fields)
        fields.only("mlp_bias", False, False)
        latent = read_latent_sizes(fields, sizes.width, sizes.num_heads)
        latent = replace(latent, pairs=fields.flag("rope_interleave", True))
        rotary, scale = read_latent_rope(fields, latent, placement.n_ctx)
        eps = fields.number("rms_norm_eps", 1e-6)
        kinds = read_kinds(fields, sizes.num_layers)

        def block(layer: int) -> LatentBlock:
            prefix = f"model.layers.{layer}"
            check_bias(load, fields, f"{prefix}.self_attn.kv_a_proj_with_mqa", False)
            attention = load_latent_attention(load, f"{prefix}.self_attn", layer, latent, scale)
            ffn = load_ffn(load, fields, f"{prefix}.mlp", sizes.width, kinds[layer], law)
            return load_block(load, prefix, FULL, sizes.width, eps, attention, ffn)

        super().__init__(
            weights.architecture,
            fields,
            sizes,
            placement,
            needs=MemoryNeeds(
                "kv", tuple(latent_rows(layer, latent, rotary) for layer in range(sizes.num_layers))
            ),
            rotaries={FULL: rotary},
            ends=load_ends(load, fields, sizes, eps),
            blocks=[block(layer) for layer in range(sizes.num_layers)],
        )


class DeepSeekV3(LatentDecoder):
    """See `Model`."""

    def __init__(self, weights: WeightSource, placement: Placement) -> None:
        check_groups(Fields(weights))
        super().__init__(weights, placement, load_biased_sigmoid)
