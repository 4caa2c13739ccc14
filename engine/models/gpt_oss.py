"""gpt-oss: every other layer with a sliding window, logits that join each softmax as sinks, and experts
whose gates are clamped (OpenAI, gpt-oss model card, section 2)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from engine.cache.memory import WindowSpec
from engine.linear import Linear
from engine.models.base import Placement, WeightSource
from engine.models.blocks import SerialBlock
from engine.models.decoder import Decoder, Ends, grouped_needs
from engine.models.fields import Fields
from engine.models.hub_rope import read_rope
from engine.models.loading import Loader, check_bias, hub_attention, hub_head, own
from engine.models.moe import by_expert
from engine.models.sizes import FULL, SLIDING, Sizes, read_layer_types, read_sizes
from engine.parallel.ranks import Ranks, once
from engine.parallel.share import values_of


@dataclass(frozen=True, slots=True)
class ClampedExperts:
    """Experts with biases: down((up + 1) * gate * sigmoid(alpha gate)), the gate at most `limit`, up within
    [-limit, limit].

    `gate_up` [experts, 2 * inner, width] holds the gate's rows, then those of up; `down` is [experts, width,
    inner].
    """

    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor
    down: torch.Tensor
    down_bias: torch.Tensor
    alpha: float
    limit: float

    def __call__(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x, self.gate_up[expert], self.gate_up_bias[expert]).chunk(2, -1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return F.linear(
            (up + 1) * gate * torch.sigmoid(gate * self.alpha), self.down[expert], self.down_bias[expert]
        )


@dataclass(frozen=True, slots=True)
class Routed:
    """The softmax over the scores of the chosen experts weighs their outputs."""

    router: Linear
    experts: ClampedExperts
    num_chosen: int
    ranks: Ranks

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        scores, chosen = self.router(x).float().topk(self.num_chosen)
        return self.ranks.total(by_expert(x, chosen, scores.softmax(-1), self.experts))


class GptOss(Decoder):
    """See `Model`."""

    def __init__(self, weights: WeightSource, placement: Placement) -> None:
        fields, load = Fields(weights), Loader(weights, placement)
        sizes = read_sizes(fields)
        alternating = tuple((SLIDING, FULL)[layer % 2] for layer in range(sizes.num_layers))
        kinds = read_layer_types(fields, (SLIDING, FULL), alternating)
        if not fields.has("rope_parameters") and not fields.has("rope_scaling"):
            raise fields.refused("rope_parameters", None)  # it would be stretched, not plain RoPE
        rotary = read_rope(fields, sizes.head_size, placement.n_ctx, default_base=150_000.0)
        embedding = load.tensor("model.embed_tokens.weight", sizes.vocab_size, sizes.width)
        eps = fields.positive("rms_norm_eps", 1e-5)
        windows = {FULL: None, SLIDING: WindowSpec(fields.count("sliding_window"))}
        super().__init__(
            weights.architecture,
            fields,
            sizes,
            placement,
            needs=grouped_needs(sizes, [(rotary, windows[kind]) for kind in kinds]),
            rotaries={SLIDING: rotary, FULL: rotary},
            ends=Ends(
                embedding,
                load.norm("model.norm", sizes.width, eps),
                hub_head(load, fields, sizes, embedding, tied=False),
            ),
            blocks=[_block(load, fields, sizes, layer, kind, eps) for layer, kind in enumerate(kinds)],
        )


def _block(load: Loader, fields: Fields, sizes: Sizes, layer: int, kind: str, eps: float) -> SerialBlock:
    prefix = f"model.layers.{layer}"
    num_experts = fields.count("num_local_experts")
    check_bias(load, fields, f"{prefix}.self_attn.q_proj", True)
    attention = hub_attention(load, f"{prefix}.self_attn", layer, sizes, sizes.head_size**-0.5)
    mixture = Routed(
        router=load.linear((f"{prefix}.mlp.router",), (num_experts,), sizes.width),
        experts=_experts(load, fields, f"{prefix}.mlp.experts", num_experts, sizes.width),
        num_chosen=fields.count("num_experts_per_tok", most=num_experts),
        ranks=load.ranks,
    )
    mine = values_of(load.share.heads(sizes.num_heads, sizes.num_kv_heads).q, 1)
    sinks = load.exact(f"{prefix}.self_attn.sinks", sizes.num_heads)[mine]
    return SerialBlock(
        kind=kind,
        attention_norm=load.norm(f"{prefix}.input_layernorm", sizes.width, eps),
        attention=replace(attention, sinks=sinks),
        ffn_norm=load.norm(f"{prefix}.post_attention_layernorm", sizes.width, eps),
        ffn=mixture,
    )


def _experts(load: Loader, fields: Fields, prefix: str, num_experts: int, width: int) -> ClampedExperts:
    inner = fields.count("intermediate_size")
    gate_up = load.tensor(f"{prefix}.gate_up_proj", num_experts, width, 2 * inner)
    bias = load.tensor(f"{prefix}.gate_up_proj_bias", num_experts, 2 * inner)
    down = load.tensor(f"{prefix}.down_proj", num_experts, inner, width)
    mine = values_of(load.share.columns(inner), 1)
    # The file has matrices as [inputs, outputs], and outputs of the gate and of up take turns.
    return ClampedExperts(
        gate_up=torch.cat((gate_up[..., ::2][..., mine], gate_up[..., 1::2][..., mine]), -1).mT.contiguous(),
        gate_up_bias=torch.cat((bias[..., ::2][..., mine], bias[..., 1::2][..., mine]), -1),
        down=own(down[:, mine].mT),
        down_bias=once(load.tensor(f"{prefix}.down_proj_bias", num_experts, width), load.share),
        alpha=fields.number("swiglu_alpha", 1.702),
        limit=fields.positive("swiglu_limit", 7.0),
    )
