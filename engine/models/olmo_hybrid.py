"""OLMo Hybrid (model card, 2026): gated delta nets, whose writing may turn a state about, and between them
layers of attention, as a rule without positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.cache.memory import MemoryNeeds, PartNeed, View, keys_and_values
from engine.linear import Linear
from engine.models.base import Placement, WeightSource
from engine.models.conv import ShortConv, load_conv
from engine.models.decoder import Decoder, Ends, Pass
from engine.models.fields import Fields
from engine.models.gdn import DeltaNet, DeltaSizes, read_delta_sizes
from engine.models.hub_rope import read_rope, rope_section
from engine.models.layers import FeedForward, RmsNorm
from engine.models.loading import Loader, hub_ffn, hub_head, hub_qkv
from engine.models.qwen3_next import check_silu, read_kinds
from engine.models.sizes import FULL, Sizes, read_sizes
from engine.rope import Angles, Rotary, turn

#: that of the delta nets' own norms, whatever the configuration says of the others
_DELTA_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class WideNormAttention:
    """Grouped-query attention, with norms over all heads of q and of k together: every rank has them all."""

    layer: int
    qkv: Linear
    out: Linear
    q_norm: RmsNorm
    k_norm: RmsNorm
    head_size: int

    def __call__(self, x: torch.Tensor, angles: Angles | None, view: View) -> torch.Tensor:
        """`x` [tokens, width] in the model's dtype; the same shape comes back. No angles: no positions."""
        kv_width = self.k_norm.weight.numel()
        q, k, v = torch.split(self.qkv(x), [self.q_norm.weight.numel(), kv_width, kv_width], dim=-1)
        shape = (x.shape[0], -1, self.head_size)
        q, k = self.q_norm(q.float()).view(shape), self.k_norm(k.float()).view(shape)
        if angles is not None:
            q, k = turn(q, angles), turn(k, angles)
        attended = view.attend(
            self.layer, q.to(x.dtype), k.to(x.dtype), v.reshape(shape), self.head_size**-0.5
        )
        return self.out(attended.reshape(x.shape[0], -1))


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Norms stand behind both halves."""

    attention: WideNormAttention
    after_attention_norm: RmsNorm
    ffn: FeedForward
    after_ffn_norm: RmsNorm

    def __call__(self, x: torch.Tensor, step: Pass) -> torch.Tensor:
        attended = self.attention(x.to(step.dtype), step.angles.get(FULL), step.view)
        x = x + self.after_attention_norm(attended.float())
        return x + self.after_ffn_norm(self.ffn(x.to(step.dtype)).float())


@dataclass(frozen=True, slots=True)
class NetBlock:
    """Norms stand before both halves."""

    net_norm: RmsNorm
    net: DeltaNet
    ffn_norm: RmsNorm
    ffn: FeedForward

    def __call__(self, x: torch.Tensor, step: Pass) -> torch.Tensor:
        x = x + self.net(self.net_norm(x).to(step.dtype), step.view)
        return x + self.ffn(self.ffn_norm(x).to(step.dtype))


class OlmoHybrid(Decoder):
    """See `Model`."""

    def __init__(self, weights: WeightSource, placement: Placement) -> None:
        fields, load = Fields(weights), Loader(weights, placement)
        sizes, deltas = read_sizes(fields), read_delta_sizes(fields)
        check_silu(fields)
        kinds = read_kinds(fields, sizes.num_layers)
        rotary = _rotary(fields, sizes, placement.n_ctx)
        eps = fields.number("rms_norm_eps", 1e-6)
        embedding = load.tensor("model.embed_tokens.weight", sizes.vocab_size, sizes.width)
        parts: list[PartNeed] = []
        blocks: list[AttentionBlock | NetBlock] = []
        for layer, kind in enumerate(kinds):
            name, size = f"model.layers.{layer}", sizes.head_size
            ffn = hub_ffn(load, f"{name}.mlp", sizes.width, fields.count("intermediate_size"), F.silu)
            if kind == FULL:
                parts += keys_and_values(layer, sizes.num_kv_heads, size, size, rotary, split=False)
                blocks.append(_attention_block(load, name, layer, sizes, ffn, eps))
            else:
                parts += deltas.parts(layer)
                net = _net(load, fields, f"{name}.linear_attn", layer, sizes.width, deltas)
                blocks.append(
                    NetBlock(
                        net_norm=load.norm(f"{name}.attention_layer_norm", sizes.width, eps),
                        net=net,
                        ffn_norm=load.norm(f"{name}.feedforward_layer_norm", sizes.width, eps),
                        ffn=ffn,
                    )
                )
        super().__init__(
            weights.architecture,
            fields,
            sizes,
            placement,
            needs=MemoryNeeds("hybrid", tuple(parts)),
            rotaries={} if rotary is None else {FULL: rotary},
            ends=Ends(
                embedding,
                load.norm("model.norm", sizes.width, eps),
                hub_head(load, fields, sizes, embedding, tied=False),
            ),
            blocks=blocks,
        )


def _rotary(fields: Fields, sizes: Sizes, n_ctx: int) -> Rotary | None:
    """None where the file says that the base is null: attention has no positions then. A file that says
    nothing is refused, since transformers takes it to have some."""
    rope = rope_section(fields, None)
    if rope.has("rope_theta") or fields.has("rope_theta"):
        return read_rope(fields, sizes.head_size, n_ctx)
    (rope if fields.has("rope_parameters") else fields).positive_or_null("rope_theta")
    return None


def _attention_block(
    load: Loader, prefix: str, layer: int, sizes: Sizes, ffn: FeedForward, eps: float
) -> AttentionBlock:
    """transformers writes the first norm under the name that the other layers' second one has."""
    name = f"{prefix}.post_attention_layernorm"
    if not load.has(f"{name}.weight"):
        name = f"{prefix}.feedforward_layer_norm"
    q_width, kv_width = sizes.num_heads * sizes.head_size, sizes.num_kv_heads * sizes.head_size
    return AttentionBlock(
        attention=WideNormAttention(
            layer=layer,
            qkv=hub_qkv(load.mirrored, f"{prefix}.self_attn", sizes),
            out=load.linear((f"{prefix}.self_attn.o_proj",), (sizes.width,), q_width),
            q_norm=load.norm(f"{prefix}.self_attn.q_norm", q_width, eps),
            k_norm=load.norm(f"{prefix}.self_attn.k_norm", kv_width, eps),
            head_size=sizes.head_size,
        ),
        after_attention_norm=load.norm(name, sizes.width, eps),
        ffn=ffn,
        after_ffn_norm=load.norm(f"{prefix}.post_feedforward_layernorm", sizes.width, eps),
    )


def _net(load: Loader, fields: Fields, prefix: str, layer: int, width: int, deltas: DeltaSizes) -> DeltaNet:
    heads = deltas.num_v_heads
    names = tuple(f"{prefix}.{name}_proj" for name in ("q", "k", "v", "g", "b", "a"))
    rows = (deltas.k_width, deltas.k_width, deltas.v_width, deltas.v_width, heads, heads)
    convs = [
        load_conv(load, f"{prefix}.{name}_conv1d", channels, deltas.kernel)
        for name, channels in zip(("q", "k", "v"), rows, strict=False)
    ]
    return DeltaNet(
        layer=layer,
        sizes=deltas,
        inputs=load.linear(names, rows, width),
        conv=ShortConv(torch.cat([conv.weight for conv in convs])),
        rate=-load.exact(f"{prefix}.A_log", heads).exp(),
        dt_bias=load.exact(f"{prefix}.dt_bias", heads),
        norm=load.norm(f"{prefix}.o_norm", deltas.v_size, _DELTA_EPS),
        gate=F.silu,
        out=load.linear((f"{prefix}.o_proj",), (width,), deltas.v_width),
        most_written=2.0 if fields.flag("linear_allow_neg_eigval", True) else 1.0,
    )
