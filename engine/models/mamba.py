"""Mamba (Gu & Dao 2023, "Mamba"): selective state-space mixers and nothing else, no positions."""

from __future__ import annotations

import math

from engine.models.base import DEFAULT_CONTEXT, Placement, WeightSource
from engine.models.decoder import Decoder, Ends
from engine.models.fields import Fields
from engine.models.loading import Loader, check_bias, hub_head
from engine.models.sizes import Sizes
from engine.models.ssm1 import Norms, Ssm1Sizes, load_ssm1
from engine.models.ssm_block import MixingBlock, load_embedding, needs_of


class Mamba(Decoder):
    """See `Model`."""

    def __init__(self, weights: WeightSource, placement: Placement) -> None:
        fields, load = Fields(weights), Loader(weights, placement)
        fields.only("hidden_act", "silu", "silu")
        fields.only("quantization_config", None)
        width = fields.count("hidden_size")
        inner = Ssm1Sizes(
            channels=fields.count("intermediate_size", fields.count("expand", 2) * width),
            d_state=fields.count("state_size"),
            rank=fields.count_or_auto("time_step_rank", math.ceil(width / 16)),
            kernel=fields.count("conv_kernel", 4, least=2),
        )
        # A channel is a head with one value.
        sizes = Sizes(
            num_layers=fields.count("num_hidden_layers", most=4096),
            width=width,
            num_heads=inner.channels,
            num_kv_heads=1,
            head_size=1,
            vocab_size=fields.count("vocab_size"),
            n_ctx_train=fields.count("max_position_embeddings", DEFAULT_CONTEXT),
        )
        eps = fields.positive("layer_norm_epsilon", 1e-5)
        embedding = load_embedding(load, sizes)
        norm = load.norm("backbone.norm_f", width, eps)
        norms, layers = self._norms(fields, placement, inner), range(sizes.num_layers)
        super().__init__(
            weights.architecture,
            fields,
            sizes,
            placement,
            needs=needs_of(part for layer in layers for part in inner.parts(layer)),
            rotaries={},
            ends=Ends(embedding, norm, hub_head(load, fields, sizes, embedding, tied=True)),
            blocks=[_block(load, fields, layer, width, inner, norms, eps) for layer in layers],
        )

    def _norms(self, fields: Fields, placement: Placement, sizes: Ssm1Sizes) -> Norms | None:
        """What is made of a token for all channels has no norms here."""
        return None


def _block(
    load: Loader, fields: Fields, layer: int, width: int, sizes: Ssm1Sizes, norms: Norms | None, eps: float
) -> MixingBlock:
    prefix = f"backbone.layers.{layer}"
    check_bias(load, fields, f"{prefix}.mixer.in_proj", False, "use_bias")
    check_bias(load, fields, f"{prefix}.mixer.conv1d", True, "use_conv_bias")
    mixer = load_ssm1(load, f"{prefix}.mixer", layer, width, sizes, norms)
    return MixingBlock(load.norm(f"{prefix}.norm", width, eps), mixer)
