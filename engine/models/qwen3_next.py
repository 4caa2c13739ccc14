"""Qwen3-Next: three gated delta nets to each layer of attention, whose output is gated too, and a mixture of
experts with one that all tokens share (Qwen3-Next model card, 2025)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.cache.memory import Chosen, MemoryNeeds, PartNeed, View, keys_and_values
from engine.linear import Linear
from engine.models.base import Placement, WeightSource
from engine.models.conv import load_conv
from engine.models.decoder import Decoder, Ends, Pass
from engine.models.fields import Fields
from engine.models.gdn import DeltaNet, DeltaSizes, read_delta_sizes
from engine.models.hub_experts import hub_experts
from engine.models.hub_rope import read_rope
from engine.models.layers import FeedForward, HeadNorm, Projection, RmsNorm
from engine.models.loading import Loader, hub_ffn, hub_head, hub_out, hub_prefix, local
from engine.models.moe import Experts
from engine.models.sizes import FULL, Sizes, read_layer_types, read_sizes
from engine.rope import Angles, turn

#: the other word of layer_types
LINEAR = "linear_attention"


@dataclass(frozen=True, slots=True)
class GatedAttention:
    """Grouped-query attention whose output is multiplied by sigmoids of the input. `inputs` has the rows of
    q, k, v and of the gate, which is as wide as q."""

    layer: int
    inputs: Linear
    out: Projection
    num_heads: int
    num_kv_heads: int
    head_size: int
    norm: HeadNorm

    def __call__(
        self, x: torch.Tensor, angles: Angles, view: View, chosen: Chosen | None = None
    ) -> torch.Tensor:
        """`x` [tokens, width] in the model's dtype, to the same shape. `chosen` is that of `View.attend`."""
        q_width, kv_width = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        qk, v, gate = torch.split(self.inputs(x), [q_width + kv_width, kv_width, q_width], dim=-1)
        qk = self.norm(qk.view(x.shape[0], -1, self.head_size).float())
        turned = turn(qk, angles).to(x.dtype)
        q, k = torch.split(turned, [self.num_heads, self.num_kv_heads], dim=1)
        v = v.view(x.shape[0], -1, self.head_size)
        attended = view.attend(self.layer, q, k, v, self.head_size**-0.5, chosen=chosen).flatten(1)
        return self.out((attended.float() * torch.sigmoid(gate.float())).to(x.dtype))


@dataclass(frozen=True, slots=True)
class SharedMixture:
    """The likeliest experts of each token, and one that every token goes to, as much as its gate says."""

    router: Linear
    num_chosen: int
    normalised: bool
    experts: Experts
    shared: FeedForward
    shared_gate: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [tokens, width] in the model's dtype, to float32."""
        weights, chosen = self.router(x).float().softmax(-1).topk(self.num_chosen)
        if self.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        share = torch.sigmoid(self.shared_gate(x).float())
        return self.experts(x, chosen, weights) + share * self.shared(x).float()


@dataclass(frozen=True, slots=True)
class DeltaBlock:
    """A layer, of one kind or the other."""

    mixer_norm: RmsNorm
    mixer: GatedAttention | DeltaNet
    ffn_norm: RmsNorm
    ffn: FeedForward | SharedMixture

    def __call__(self, x: torch.Tensor, step: Pass) -> torch.Tensor:
        h = self.mixer_norm(x).to(step.dtype)
        if isinstance(self.mixer, DeltaNet):
            x = x + self.mixer(h, step.view)
        else:
            x = x + self.mixer(h, step.angles[FULL], step.view)
        return x + self.ffn(self.ffn_norm(x).to(step.dtype))


#: loads the rows of q, k, v, z, b and a of a delta net, whose tensors have this prefix, joined in this order
LoadInputs = Callable[[Loader, str, int, DeltaSizes], Sequence[torch.Tensor]]
#: loads the second half of a layer
LoadFfn = Callable[[Loader, Fields, str, int, int], FeedForward | SharedMixture]


class DeltaDecoder(Decoder):
    """Delta nets and layers of gated attention; families differ in how their tensors lie, and in the second
    halves of layers."""

    def __init__(
        self, weights: WeightSource, placement: Placement, load_inputs: LoadInputs, load_ffn: LoadFfn
    ) -> None:
        fields, load = Fields(weights), Loader(weights, placement)
        sizes, deltas = read_sizes(fields), read_delta_sizes(fields)
        check_silu(fields)
        fields.only("attn_output_gate", True, True)
        kinds = read_kinds(fields, sizes.num_layers)
        rotary = read_rope(fields, sizes.head_size, placement.n_ctx, default_share=0.25)
        eps, prefix, width = fields.number("rms_norm_eps", 1e-6), hub_prefix(load), sizes.width
        embedding = load.tensor(f"{prefix}.embed_tokens.weight", sizes.vocab_size, width)
        parts: list[PartNeed] = []
        blocks: list[DeltaBlock] = []
        for layer, kind in enumerate(kinds):
            name, size = f"{prefix}.layers.{layer}", sizes.head_size
            if kind == FULL:
                parts += keys_and_values(layer, sizes.num_kv_heads, size, size, rotary)
            else:
                parts += deltas.parts(layer)
            blocks.append(
                DeltaBlock(
                    mixer_norm=centred_norm(load, f"{name}.input_layernorm", width, eps),
                    mixer=(
                        load_gated_attention(load, f"{name}.self_attn", layer, sizes, eps)
                        if kind == FULL
                        else _load_net(load, f"{name}.linear_attn", layer, width, deltas, load_inputs, eps)
                    ),
                    ffn_norm=centred_norm(load, f"{name}.post_attention_layernorm", width, eps),
                    ffn=load_ffn(load, fields, f"{name}.mlp", layer, width),
                )
            )
        super().__init__(
            weights.architecture,
            fields,
            sizes,
            placement,
            needs=MemoryNeeds("hybrid", tuple(parts)),
            rotaries={FULL: rotary},
            ends=Ends(
                embedding,
                centred_norm(load, f"{prefix}.norm", width, eps),
                hub_head(load, fields, sizes, embedding, tied=False),
            ),
            blocks=blocks,
        )


class Qwen3Next(DeltaDecoder):
    """See `Model`."""

    def __init__(self, weights: WeightSource, placement: Placement) -> None:
        super().__init__(weights, placement, _load_inputs, load_experts)


def read_kinds(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """Of each layer FULL or LINEAR. Raises WeightsRefused unless there are some of both."""
    every = fields.count("full_attention_interval", 4)
    default = tuple(LINEAR if (layer + 1) % every else FULL for layer in range(num_layers))
    kinds = read_layer_types(fields, (LINEAR, FULL), default)
    if len(set(kinds)) != 2:
        raise fields.refused("layer_types", " ".join(kinds))
    return kinds


def check_silu(fields: Fields) -> None:
    """Refuses another activation, and biases of attention, which no model of these families has."""
    fields.only("hidden_act", "silu", "silu")
    fields.only("attention_bias", False, False)


def centred_norm(load: Loader, name: str, width: int, eps: float) -> RmsNorm:
    return load.norm_from_one(name, width, eps)


def load_gated_attention(load: Loader, prefix: str, layer: int, sizes: Sizes, eps: float) -> GatedAttention:
    """The file has the rows of q and those of the gate head by head."""
    heads, kv_heads, size, width = sizes.num_heads, sizes.num_kv_heads, sizes.head_size, sizes.width
    both = load.tensor(f"{prefix}.q_proj.weight", heads * 2 * size, width).view(heads, 2, size, width)
    k = load.tensor(f"{prefix}.k_proj.weight", kv_heads * size, width)
    v = load.tensor(f"{prefix}.v_proj.weight", kv_heads * size, width)
    q, gate = both[:, 0].reshape(-1, width), both[:, 1].reshape(-1, width)
    mine = local(load, sizes)
    q_rows, kv_rows, _ = load.share.heads(heads, kv_heads).each(size, size)
    q_norm = centred_norm(load, f"{prefix}.q_norm", size, eps).weight.expand(mine.num_heads, -1)
    k_norm = centred_norm(load, f"{prefix}.k_norm", size, eps).weight.expand(mine.num_kv_heads, -1)
    return GatedAttention(
        layer=layer,
        inputs=Linear(torch.cat((q[q_rows], k[kv_rows], v[kv_rows], gate[q_rows]))),
        out=hub_out(load, f"{prefix}.o_proj", sizes),
        num_heads=mine.num_heads,
        num_kv_heads=mine.num_kv_heads,
        head_size=size,
        norm=HeadNorm(torch.cat((q_norm, k_norm)), eps),
    )


def load_delta_net(
    load: Loader,
    prefix: str,
    layer: int,
    width: int,
    deltas: DeltaSizes,
    inputs: Sequence[torch.Tensor],
    eps: float,
) -> DeltaNet:
    """`inputs` are the rows of q, k, v, z, b and a, joined."""
    heads = deltas.num_v_heads
    return DeltaNet(
        layer=layer,
        sizes=deltas,
        inputs=Linear(torch.cat(tuple(inputs))),
        conv=load_conv(load, f"{prefix}.conv1d", deltas.channels, deltas.kernel),
        rate=-load.exact(f"{prefix}.A_log", heads).exp(),
        dt_bias=load.exact(f"{prefix}.dt_bias", heads),
        norm=load.norm(f"{prefix}.norm", deltas.v_size, eps),
        gate=F.silu,
        out=load.linear((f"{prefix}.out_proj",), (width,), deltas.v_width),
    )


def _load_net(
    load: Loader,
    prefix: str,
    layer: int,
    width: int,
    deltas: DeltaSizes,
    load_inputs: LoadInputs,
    eps: float,
) -> DeltaNet:
    inputs = load_inputs(load, prefix, width, deltas)
    return load_delta_net(load, prefix, layer, width, deltas, inputs, eps)


def _load_inputs(load: Loader, prefix: str, width: int, deltas: DeltaSizes) -> Sequence[torch.Tensor]:
    """The file has rows by key head: its q, its k, and v and z of the heads that share them; so b and a."""
    heads = deltas.num_k_heads
    values = deltas.v_width // heads
    each = [deltas.k_size, deltas.k_size, values, values]
    qkvz = load.tensor(f"{prefix}.in_proj_qkvz.weight", heads * sum(each), width)
    ba = load.tensor(f"{prefix}.in_proj_ba.weight", 2 * deltas.num_v_heads, width)
    by_head = torch.split(qkvz.view(heads, -1, width), each, dim=1)
    return [rows.reshape(-1, width) for rows in (*by_head, *ba.view(heads, -1, width).chunk(2, dim=1))]


def load_experts(
    load: Loader, fields: Fields, prefix: str, layer: int, width: int
) -> FeedForward | SharedMixture:
    """A mixture, or a plain feed-forward where the configuration says so of `layer`."""
    dense = fields.counts("mlp_only_layers") if fields.has("mlp_only_layers") else ()
    num_experts = fields.count("num_experts", least=0, most=2**16)
    every = fields.count("decoder_sparse_step", 1)
    if layer in dense or not num_experts or (layer + 1) % every:
        return hub_ffn(load, prefix, width, fields.count("intermediate_size"), F.silu)
    inner, shared = fields.count("moe_intermediate_size"), fields.count("shared_expert_intermediate_size")
    return SharedMixture(
        router=load.linear((f"{prefix}.gate",), (num_experts,), width),
        num_chosen=fields.count("num_experts_per_tok", most=num_experts),
        normalised=fields.flag("norm_topk_prob", True),
        experts=hub_experts(load, f"{prefix}.experts", num_experts, inner, width, F.silu),
        shared=hub_ffn(load, f"{prefix}.shared_expert", width, shared, F.silu),
        shared_gate=load.linear((f"{prefix}.shared_expert_gate",), (1,), width),
    )
