"""Zamba2 (Glorioso et al. 2024, "The Zamba2 Suite", section 2): layers of Mamba-2, and before some of them a
transformer block out of a few that take turns. A block sees the stream beside the embeddings of its tokens,
and what it makes joins the input of the mixer behind it, not the stream. Its matrices are the same wherever
it stands, but for adapters of low rank; its keys and values are of each place.

Step sizes are bounded by time_step_limit alone, if the configuration has one: time_step_min is for the start
of training.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.cache.memory import PartNeed, View, keys_and_values
from engine.models.base import Placement, WeightSource
from engine.models.decoder import Decoder, Ends, Pass
from engine.models.fields import Fields
from engine.models.hub_rope import read_rope
from engine.models.layers import RmsNorm
from engine.models.loading import Loader, check_bias, hub_head
from engine.models.sizes import FULL, Sizes
from engine.models.ssm2 import GatedNorm, Ssm2Mixer, Ssm2Names, Ssm2Sizes, load_ssm2, read_ssm2_sizes
from engine.models.ssm_block import needs_of
from engine.models.zamba2_block import SharedBlock, load_shared_blocks

_NAMES = Ssm2Names("n_mamba_heads", "mamba_headdim", "mamba_ngroups", "mamba_d_state", "mamba_d_conv")
_GATE_EPS = 1e-5  # of the mixer's norm, which no field says


@dataclass(frozen=True, slots=True)
class Zamba2Layer:
    """x + mixer(norm(x)), or x + mixer(norm(x + block(x, embeddings)))."""

    block: SharedBlock | None
    norm: RmsNorm
    mixer: Ssm2Mixer

    def __call__(self, x: torch.Tensor, first: torch.Tensor, step: Pass) -> torch.Tensor:
        seen = x if self.block is None else x + self.block(x, first, step)
        return x + self.mixer(self.norm(seen).to(step.dtype), step).float()


class Zamba2(Decoder):
    """See `Model`."""

    def __init__(self, weights: WeightSource, placement: Placement) -> None:
        fields, load = Fields(weights), Loader(weights, placement)
        fields.only("hidden_act", "gelu", "gelu")
        fields.only("use_long_context", False, False)
        # Where it is false the reference shares no blocks either, and no model is published so.
        fields.only("tie_word_embeddings", True, True)
        sizes = _sizes(fields)
        inner = read_ssm2_sizes(fields, fields.count("mamba_expand", 2) * sizes.width, _NAMES)
        kinds = fields.words("layers_block_type", sizes.num_layers, ("linear_attention", "mamba", "hybrid"))
        rotary = None
        if fields.flag("use_mem_rope", False):
            rotary = read_rope(fields, sizes.head_size, placement.n_ctx)
        places = [layer for layer, kind in enumerate(kinds) if kind == "hybrid"]
        parts: list[PartNeed] = []
        for layer in range(sizes.num_layers):
            if layer in places:
                heads, size = sizes.num_kv_heads, sizes.head_size
                parts += keys_and_values(layer, heads, size, size, rotary, split=False)
            parts += inner.parts(layer)
        embedding = load.tensor("model.embed_tokens.weight", sizes.vocab_size, sizes.width)
        eps = fields.positive("rms_norm_eps", 1e-5)
        super().__init__(
            weights.architecture,
            fields,
            sizes,
            placement,
            needs=needs_of(parts),
            rotaries={} if rotary is None else {FULL: rotary},
            ends=Ends(
                embedding,
                load.norm("model.final_layernorm", sizes.width, eps),
                hub_head(load, fields, sizes, embedding, tied=True),
            ),
            blocks=(),
        )
        blocks = load_shared_blocks(load, fields, sizes, places, eps)
        self._layers = tuple(
            _layer(load, fields, sizes, inner, layer, blocks.get(layer), eps)
            for layer in range(sizes.num_layers)
        )

    def _stream(self, tokens: torch.Tensor, positions: torch.Tensor, view: View) -> torch.Tensor:
        step = self._pass(positions, view)
        x = first = self._ends.embed(tokens)
        for layer in self._layers:
            x = layer(x, first, step)
        return x


def _sizes(fields: Fields) -> Sizes:
    """Attention is as wide as the stream and the embeddings beside it."""
    fields.only("quantization_config", None)
    width, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    if 2 * width % num_heads:
        raise fields.refused("num_attention_heads", num_heads)
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.refused("num_key_value_heads", num_kv_heads)
    return Sizes(
        num_layers=fields.count("num_hidden_layers", most=4096),
        width=width,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=fields.count("attention_head_dim", 2 * width // num_heads),
        vocab_size=fields.count("vocab_size"),
        n_ctx_train=fields.count("max_position_embeddings"),
    )


def _layer(
    load: Loader,
    fields: Fields,
    sizes: Sizes,
    inner: Ssm2Sizes,
    layer: int,
    block: SharedBlock | None,
    eps: float,
) -> Zamba2Layer:
    prefix = f"model.layers.{layer}"
    if block is not None:
        prefix = f"{prefix}.mamba_decoder"
    check_bias(load, fields, f"{prefix}.mamba.in_proj", False, "add_bias_linear")
    gate = GatedNorm(load.exact(f"{prefix}.mamba.norm.weight", inner.inner), _GATE_EPS, inner.num_groups)
    return Zamba2Layer(
        block=block,
        norm=load.norm(f"{prefix}.input_layernorm", sizes.width, eps),
        mixer=load_ssm2(load, f"{prefix}.mamba", layer, sizes.width, inner, gate),
    )
