"""Kimi Linear (technical report, 2025): three layers of Kimi Delta Attention to each one of latent attention
without positions, and a mixture of experts.

`linear_attn_config.gate_lower_bound` bounds the forgetting, as in Kimi K3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from engine.cache.memory import KEYS, MemoryNeeds, PartNeed, RowsSpec
from engine.linear import Linear
from engine.models.base import DEFAULT_CONTEXT, Placement, WeightSource
from engine.models.conv import ShortConv, load_conv
from engine.models.decoder import Decoder, Ends, Pass
from engine.models.fields import Fields
from engine.models.hub_experts import hub_experts
from engine.models.kda import DeltaAttention, KdaSizes, load_delta_attention, load_forgetting
from engine.models.layers import FeedForward, RmsNorm
from engine.models.loading import Loader, check_bias, hub_ffn, hub_head
from engine.models.mla import LatentAttention, load_latent_attention, read_latent_sizes
from engine.models.mla_ffn import DENSE, SPARSE, Mixture
from engine.models.routing import BiasedSigmoid, Groups
from engine.models.sizes import FULL, read_layer_types, read_sizes

LINEAR = "linear_attention"

_MOST = 2**16


@dataclass(frozen=True, slots=True)
class KimiBlock:
    mixer_norm: RmsNorm
    mixer: LatentAttention | DeltaAttention
    ffn_norm: RmsNorm
    ffn: FeedForward | Mixture

    def __call__(self, x: torch.Tensor, step: Pass) -> torch.Tensor:
        h = self.mixer_norm(x).to(step.dtype)
        if isinstance(self.mixer, DeltaAttention):
            x = x + self.mixer(h, step.view)
        else:
            x = x + self.mixer(h, self.mixer.lower(h, None), None, step.view)
        return x + self.ffn(self.ffn_norm(x).to(step.dtype))


class KimiLinear(Decoder):
    """See `Model`."""

    def __init__(self, weights: WeightSource, placement: Placement) -> None:
        fields, load = Fields(weights), Loader(weights, placement)
        sizes = read_sizes(fields, fields.count("model_max_length", DEFAULT_CONTEXT))
        deltas = _read_deltas(fields)
        latents = replace(read_latent_sizes(fields, sizes.width, sizes.num_heads), pairs=False)
        fields.only("hidden_act", "silu", "silu")
        fields.only("mla_use_nope", True, True)
        # The published code ties where transformers does not, and no published model asks for it.
        fields.only("tie_word_embeddings", False, False)
        kinds, ffns = _read_kinds(fields, sizes.num_layers), _read_ffns(fields, sizes.num_layers)
        eps = fields.number("rms_norm_eps", 1e-5)
        embedding = load.tensor("model.embed_tokens.weight", sizes.vocab_size, sizes.width)
        parts: list[PartNeed] = []
        blocks = []
        for layer, kind in enumerate(kinds):
            name = f"model.layers.{layer}"
            if kind == FULL:
                parts.append(RowsSpec(KEYS, layer, 1, latents.row, value_size=latents.kv_rank))
                check_bias(load, fields, f"{name}.self_attn.kv_a_proj_with_mqa", False)
                mixer: LatentAttention | DeltaAttention = load_latent_attention(
                    load, f"{name}.self_attn", layer, latents, latents.head**-0.5
                )
            else:
                parts += deltas.parts(layer)
                mixer = _load_delta(load, fields, f"{name}.self_attn", layer, sizes.width, deltas, eps)
            blocks.append(
                KimiBlock(
                    mixer_norm=load.norm(f"{name}.input_layernorm", sizes.width, eps),
                    mixer=mixer,
                    ffn_norm=load.norm(f"{name}.post_attention_layernorm", sizes.width, eps),
                    ffn=_load_ffn(load, fields, name, sizes.width, ffns[layer]),
                )
            )
        super().__init__(
            weights.architecture,
            fields,
            sizes,
            placement,
            needs=MemoryNeeds("hybrid", tuple(parts)),
            rotaries={},
            ends=Ends(
                embedding,
                load.norm("model.norm", sizes.width, eps),
                hub_head(load, fields, sizes, embedding, tied=False),
            ),
            blocks=blocks,
        )


# -- the configuration -----------------------------------------------------------------------------------


def _read_deltas(fields: Fields) -> KdaSizes:
    """The hub's own files have them in an object, those that transformers writes among the rest."""
    if fields.has("linear_num_heads"):
        return KdaSizes(
            num_heads=fields.count("linear_num_heads", most=_MOST),
            head_size=fields.count("linear_head_dim", most=_MOST),
            kernel=fields.count("linear_conv_kernel_dim", least=2, most=_MOST),
        )
    inner = fields.section("linear_attn_config")
    return KdaSizes(
        num_heads=inner.count("num_heads", most=_MOST),
        head_size=inner.count("head_dim", most=_MOST),
        kernel=inner.count("short_conv_kernel_size", least=2, most=_MOST),
    )


def _read_kinds(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """FULL or LINEAR of each layer: by name, or by numbers that begin with 1."""
    if fields.has("layer_types"):
        kinds = read_layer_types(fields, (LINEAR, FULL), (LINEAR,) * num_layers)
    else:
        full = fields.section("linear_attn_config").counts("full_attn_layers", least=1, most=num_layers)
        kinds = tuple(FULL if layer + 1 in full else LINEAR for layer in range(num_layers))
    if len(set(kinds)) != 2:
        raise fields.refused("layer_types", " ".join(kinds))
    return kinds


def _read_ffns(fields: Fields, num_layers: int) -> tuple[str, ...]:
    if fields.has("mlp_layer_types"):
        return fields.words("mlp_layer_types", num_layers, (DENSE, SPARSE))
    fields.only("moe_layer_freq", 1, 1)
    dense = fields.count("first_k_dense_replace", 1, least=0)
    return tuple(DENSE if layer < dense else SPARSE for layer in range(num_layers))


# -- the tensors -----------------------------------------------------------------------------------------


def _load_delta(
    load: Loader, fields: Fields, prefix: str, layer: int, width: int, sizes: KdaSizes, eps: float
) -> DeltaAttention:
    inner = fields.section("linear_attn_config")
    bound = inner.number("gate_lower_bound") if inner.has("gate_lower_bound") else None
    if bound is not None and bound >= 0:
        raise inner.refused("gate_lower_bound", bound)
    convs = [
        load_conv(load, f"{prefix}.{name}_conv1d", sizes.width, sizes.kernel) for name in ("q", "k", "v")
    ]
    speed = load.exact(f"{prefix}.A_log", 1, 1, sizes.num_heads, 1).view(-1)
    return load_delta_attention(
        load,
        prefix,
        layer,
        width,
        sizes,
        conv=ShortConv(torch.cat([conv.weight for conv in convs])),
        forgetting=load_forgetting(load, prefix, sizes, speed, bound),
        eps=eps,
    )


def _load_ffn(load: Loader, fields: Fields, prefix: str, width: int, kind: str) -> FeedForward | Mixture:
    """Either is `mlp` or `block_sparse_moe`: transformers writes the second for both, the hub's own files do
    not."""
    sparse = f"{prefix}.block_sparse_moe"
    if kind == DENSE:
        name = sparse if load.has(f"{sparse}.gate_proj.weight") else f"{prefix}.mlp"
        return hub_ffn(load, name, width, fields.count("intermediate_size"), F.silu)
    fields.only("moe_router_activation_func", "sigmoid", "sigmoid")
    count, inner = fields.count("num_experts", most=_MOST), fields.count("moe_intermediate_size")
    groups = _read_groups(fields, count)
    return Mixture(
        router=Linear(load.exact(f"{sparse}.gate.weight", count, width)),
        law=BiasedSigmoid(
            bias=load.exact(f"{sparse}.gate.e_score_correction_bias", count),
            groups=groups,
            num_chosen=fields.count("num_experts_per_token", most=count // groups.count * groups.allowed),
            normalised=fields.flag("moe_renormalize", True),
            scale=fields.number("routed_scaling_factor"),
        ),
        experts=hub_experts(load, f"{sparse}.experts", count, inner, width, F.silu, ("w1", "w3", "w2")),
        shared=hub_ffn(
            load,
            f"{sparse}.shared_experts",
            width,
            inner * fields.count("num_shared_experts", most=_MOST),
            F.silu,
        ),
    )


def _read_groups(fields: Fields, num_experts: int) -> Groups:
    count = fields.count("num_expert_group", 1)
    if num_experts % count or (count > 1 and num_experts // count < 2):
        raise fields.refused("num_expert_group", count)
    return Groups(count, fields.count("topk_group", 1, most=count), scored=2)
