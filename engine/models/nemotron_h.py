"""Nemotron-H (NVIDIA 2025, "Nemotron-H", section 2): every layer is one thing, a Mamba-2 mixer, attention
without positions, a feed-forward, or experts; their activation is the square of ReLU, and they have no gates.

Step sizes are bounded by the configuration's time_step_limit alone, as the published model has it:
time_step_min is for the start of training.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.cache.memory import PartNeed, keys_and_values
from engine.linear import Linear
from engine.models.base import Placement, WeightSource
from engine.models.decoder import Block, Decoder, Ends
from engine.models.fields import Fields
from engine.models.layers import Projection
from engine.models.loading import Loader, check_bias, hub_attention, hub_head
from engine.models.mla_ffn import load_biased_sigmoid
from engine.models.moe import by_expert
from engine.models.routing import Law
from engine.models.sizes import Sizes
from engine.models.ssm2 import GatedNorm, Ssm2Mixer, Ssm2Names, Ssm2Sizes, load_ssm2, read_ssm2_sizes
from engine.models.ssm_block import Attends, FeedingBlock, MixingBlock, needs_of
from engine.parallel.ranks import Ranks
from engine.parallel.share import values_of

_NAMES = Ssm2Names("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
#: A layer's kind by its letter in hybrid_override_pattern, and by its words in layers_block_type.
_LETTERS = "M*-E"
_WORDS = {
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "mlp": "-",
    "moe": "E",
}


@dataclass(frozen=True, slots=True)
class SquaredFeedForward:
    """down(ReLU(up x)^2)."""

    up: Linear
    down: Projection

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)).square())


@dataclass(frozen=True, slots=True)
class SquaredExperts:
    """`up` is [experts, inner, width], `down` [experts, width, inner]."""

    up: torch.Tensor
    down: torch.Tensor

    def __call__(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.relu(F.linear(x, self.up[expert])).square(), self.down[expert])


@dataclass(frozen=True, slots=True)
class Latent:
    """Experts may work on a narrower stream: the matrices into it and out of it."""

    into: Linear
    out: Linear


@dataclass(frozen=True, slots=True)
class NemotronMoe:
    """What the router's law chooses of the experts, and `shared` that every token goes to. `router` is
    float32."""

    router: Linear
    law: Law
    experts: SquaredExperts
    latent: Latent | None
    shared: SquaredFeedForward
    ranks: Ranks

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        chosen, weights = self.law(self.router(x.float()))
        if self.latent is None:
            found = self.ranks.total(by_expert(x, chosen, weights, self.experts))
            return found + self.shared(x).float()
        found = self.ranks.total(by_expert(self.latent.into(x), chosen, weights, self.experts))
        return self.latent.out(found.to(x.dtype)).float() + self.shared(x).float()


class NemotronH(Decoder):
    """See `Model`."""

    def __init__(self, weights: WeightSource, placement: Placement) -> None:
        fields, load = Fields(weights), Loader(weights, placement)
        fields.only("mamba_hidden_act", "silu", "silu")
        fields.only("mlp_hidden_act", "relu2", "relu2")
        fields.only("sliding_window", None)
        fields.only("tie_word_embeddings", False, False)
        kinds = _kinds(fields)
        sizes, inner = _sizes(fields, len(kinds)), _inner_sizes(fields)
        eps = fields.positive("layer_norm_epsilon", 1e-5)
        embedding = load.tensor("backbone.embeddings.weight", sizes.vocab_size, sizes.width)
        parts: list[PartNeed] = []
        blocks: list[Block] = []
        for layer, kind in enumerate(kinds):
            prefix = f"backbone.layers.{layer}"
            norm = load.norm(f"{prefix}.norm", sizes.width, eps)
            if kind == "M":
                parts += inner.parts(layer)
                blocks.append(MixingBlock(norm, _mixer(load, fields, sizes, inner, layer, eps)))
            elif kind == "*":
                parts += keys_and_values(layer, sizes.num_kv_heads, sizes.head_size, sizes.head_size, None)
                blocks.append(MixingBlock(norm, _attends(load, fields, sizes, layer)))
            elif kind == "-":
                ffn = _ffn(load, fields, f"{prefix}.mixer", sizes.width, fields.count("intermediate_size"))
                blocks.append(FeedingBlock(norm, ffn))
            else:
                blocks.append(FeedingBlock(norm, _moe(load, fields, f"{prefix}.mixer", sizes.width)))
        super().__init__(
            weights.architecture,
            fields,
            sizes,
            placement,
            needs=needs_of(parts),
            rotaries={},
            ends=Ends(
                embedding,
                load.norm("backbone.norm_f", sizes.width, eps),
                hub_head(load, fields, sizes, embedding, tied=False),
            ),
            blocks=blocks,
        )


def _kinds(fields: Fields) -> str:
    """The letter of each layer."""
    if fields.has("layers_block_type"):
        words = fields.words("layers_block_type", None, tuple(_WORDS))
        return "".join(_WORDS[word] for word in words)
    return fields.letters("hybrid_override_pattern", _LETTERS)


def _sizes(fields: Fields, num_layers: int) -> Sizes:
    fields.only("quantization_config", None)
    num_heads = fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.refused("num_key_value_heads", num_kv_heads)
    return Sizes(
        num_layers=num_layers,
        width=fields.count("hidden_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=fields.count("head_dim", fields.count("attention_head_dim", 128)),
        vocab_size=fields.count("vocab_size"),
        n_ctx_train=fields.count("max_position_embeddings"),
    )


def _inner_sizes(fields: Fields) -> Ssm2Sizes:
    inner = fields.count(_NAMES.num_heads) * fields.count(_NAMES.head_size)
    return read_ssm2_sizes(fields, inner, _NAMES)


def _mixer(load: Loader, fields: Fields, sizes: Sizes, inner: Ssm2Sizes, layer: int, eps: float) -> Ssm2Mixer:
    prefix = f"backbone.layers.{layer}.mixer"
    check_bias(load, fields, f"{prefix}.in_proj", False, "use_bias")
    check_bias(load, fields, f"{prefix}.conv1d", True, "use_conv_bias")
    gate = GatedNorm(load.exact(f"{prefix}.norm.weight", inner.inner), eps, inner.num_groups)
    return load_ssm2(load, prefix, layer, sizes.width, inner, gate)


def _attends(load: Loader, fields: Fields, sizes: Sizes, layer: int) -> Attends:
    prefix = f"backbone.layers.{layer}.mixer"
    check_bias(load, fields, f"{prefix}.q_proj", False)
    return Attends(hub_attention(load, prefix, layer, sizes, sizes.head_size**-0.5), None)


def _ffn(load: Loader, fields: Fields, prefix: str, width: int, inner: int) -> SquaredFeedForward:
    check_bias(load, fields, f"{prefix}.up_proj", False, "mlp_bias")
    mine = values_of(load.share.columns(inner), 1)
    return SquaredFeedForward(
        up=load.linear((f"{prefix}.up_proj",), (inner,), width, (mine,)),
        down=load.summed(f"{prefix}.down_proj", width, inner, mine),
    )


def _moe(load: Loader, fields: Fields, prefix: str, width: int) -> NemotronMoe:
    count, inner = fields.count("n_routed_experts"), fields.count("moe_intermediate_size")
    latent, narrow = None, width
    if fields.has("moe_latent_size"):
        narrow = fields.count("moe_latent_size")
        check_bias(load, fields, f"{prefix}.fc1_latent_proj", False, "mlp_bias")
        latent = Latent(
            into=load.linear((f"{prefix}.fc1_latent_proj",), (narrow,), width),
            out=load.linear((f"{prefix}.fc2_latent_proj",), (width,), narrow),
        )
    names = [f"{prefix}.experts.{expert}" for expert in range(count)]
    mine = values_of(load.share.columns(inner), 1)
    return NemotronMoe(
        router=Linear(load.exact(f"{prefix}.gate.weight", count, width)),
        law=load_biased_sigmoid(load, fields, prefix),
        experts=SquaredExperts(
            up=torch.stack([load.tensor(f"{name}.up_proj.weight", inner, narrow)[mine] for name in names]),
            down=torch.stack(
                [load.tensor(f"{name}.down_proj.weight", narrow, inner)[:, mine] for name in names]
            ),
        ),
        latent=latent,
        shared=_ffn(
            load,
            fields,
            f"{prefix}.shared_experts",
            width,
            fields.count("moe_shared_expert_intermediate_size"),
        ),
        ranks=load.ranks,
    )
