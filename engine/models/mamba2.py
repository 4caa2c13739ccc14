"""Mamba-2 (Dao & Gu 2024, "Transformers are SSMs"): state-space mixers and nothing else, no positions."""

from __future__ import annotations

from engine.models.base import DEFAULT_CONTEXT, Placement, WeightSource
from engine.models.decoder import Decoder, Ends
from engine.models.fields import Fields
from engine.models.loading import Loader, check_bias, hub_head
from engine.models.sizes import Sizes
from engine.models.ssm2 import GatedNorm, Ssm2Names, Ssm2Sizes, load_ssm2, read_ssm2_sizes
from engine.models.ssm_block import MixingBlock, load_embedding, needs_of

_NAMES = Ssm2Names("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel")


class Mamba2(Decoder):
    """See `Model`."""

    def __init__(self, weights: WeightSource, placement: Placement) -> None:
        fields, load = Fields(weights), Loader(weights, placement)
        fields.only("hidden_act", "silu", "silu")
        fields.only("quantization_config", None)
        width = fields.count("hidden_size")
        inner = read_ssm2_sizes(fields, fields.count("expand", 2) * width, _NAMES)
        sizes = Sizes(
            num_layers=fields.count("num_hidden_layers", most=4096),
            width=width,
            num_heads=inner.num_heads,
            num_kv_heads=inner.num_groups,
            head_size=inner.head_size,
            vocab_size=fields.count("vocab_size"),
            n_ctx_train=fields.count("max_position_embeddings", DEFAULT_CONTEXT),
        )
        eps = fields.positive("layer_norm_epsilon", 1e-5)
        embedding = load_embedding(load, sizes)
        norm = load.norm("backbone.norm_f", width, eps)
        layers = range(sizes.num_layers)
        super().__init__(
            weights.architecture,
            fields,
            sizes,
            placement,
            needs=needs_of(part for layer in layers for part in inner.parts(layer)),
            rotaries={},
            ends=Ends(embedding, norm, hub_head(load, fields, sizes, embedding, tied=False)),
            blocks=[_block(load, fields, layer, width, inner, eps) for layer in layers],
        )


def _block(load: Loader, fields: Fields, layer: int, width: int, sizes: Ssm2Sizes, eps: float) -> MixingBlock:
    prefix = f"backbone.layers.{layer}"
    check_bias(load, fields, f"{prefix}.mixer.in_proj", False, "use_bias")
    check_bias(load, fields, f"{prefix}.mixer.conv1d", True, "use_conv_bias")
    gate = GatedNorm(load.exact(f"{prefix}.mixer.norm.weight", sizes.inner), eps, sizes.num_groups)
    mixer = load_ssm2(load, f"{prefix}.mixer", layer, width, sizes, gate)
    return MixingBlock(load.norm(f"{prefix}.norm", width, eps), mixer)
