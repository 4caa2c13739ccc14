"""The second half of a block in DeepSeek's families: a feed-forward, or experts and some for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.linear import Linear
from engine.models.fields import Fields
from engine.models.hub_experts import hub_experts
from engine.models.layers import FeedForward
from engine.models.loading import Loader, hub_ffn
from engine.models.moe import Experts
from engine.models.routing import BiasedSigmoid, Groups, Law

DENSE, SPARSE = "dense", "sparse"
MAX_EXPERTS = 65536


@dataclass(frozen=True, slots=True)
class Mixture:
    """What the router's law chooses of the experts, and `shared` that every token goes to. `router` is
    float32."""

    router: Linear
    law: Law
    experts: Experts
    shared: FeedForward

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, width] in the model's dtype to float32 [tokens, width]."""
        chosen, weights = self.law(self.router(x.float()))
        return self.experts(x, chosen, weights) + self.shared(x).float()


#: [tokens, width] in the model's dtype to the same in any
Ffn = Callable[[torch.Tensor], torch.Tensor]


def read_kinds(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """DENSE or SPARSE of each layer: by name, or the first `first_k_dense_replace` dense."""
    if fields.has("mlp_layer_types"):
        return fields.words("mlp_layer_types", num_layers, (DENSE, SPARSE))
    fields.only("moe_layer_freq", 1, 1)
    num_dense = min(fields.count("first_k_dense_replace", least=0), num_layers)
    return (DENSE,) * num_dense + (SPARSE,) * (num_layers - num_dense)


#: what reads a family's law from the configuration and from the tensors of a prefix
LoadLaw = Callable[[Loader, Fields, str], Law]


def load_ffn(
    load: Loader,
    fields: Fields,
    prefix: str,
    width: int,
    kind: str,
    law: LoadLaw,
    shared_width: int | None = None,
) -> Ffn:
    """The tensors of `prefix` under the hub's names; `shared_width` is that of one shared expert, where it is
    not the others'."""
    fields.only("hidden_act", "silu", "silu")
    if kind == DENSE:
        return hub_ffn(load, prefix, width, fields.count("intermediate_size"), F.silu)
    count, inner = fields.count("n_routed_experts", most=MAX_EXPERTS), fields.count("moe_intermediate_size")
    num_shared = fields.count("n_shared_experts", most=MAX_EXPERTS)
    shared = num_shared * (inner if shared_width is None else shared_width)
    return Mixture(
        router=Linear(load.exact(f"{prefix}.gate.weight", count, width)),
        law=law(load, fields, prefix),
        experts=hub_experts(load, f"{prefix}.experts", count, inner, width, F.silu),
        shared=hub_ffn(load, f"{prefix}.shared_experts", width, shared, F.silu),
    )


def load_biased_sigmoid(load: Loader, fields: Fields, prefix: str) -> BiasedSigmoid:
    """DeepSeek-V3's law; other words for it in the configuration are refused."""
    fields.only("scoring_func", "sigmoid", "sigmoid")
    fields.only("topk_method", "noaux_tc", "noaux_tc")
    count = fields.count("n_routed_experts", most=MAX_EXPERTS)
    groups = read_groups(fields, count, scored=2)
    return BiasedSigmoid(
        bias=load.exact(f"{prefix}.gate.e_score_correction_bias", count),
        groups=groups,
        num_chosen=read_num_chosen(fields, count, groups),
        normalised=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor"),
    )


def check_groups(fields: Fields) -> None:
    """Refuses a file that leaves out how experts are grouped, where that would not mean one group."""
    for name in ("n_group", "topk_group"):
        fields.count(name)


def read_groups(fields: Fields, num_experts: int, scored: int) -> Groups:
    count = fields.count("n_group", 1)
    if num_experts % count or num_experts // count < (scored if count > 1 else 1):
        raise fields.refused("n_group", count)
    return Groups(count, fields.count("topk_group", 1, most=count), scored)


def read_num_chosen(fields: Fields, num_experts: int, groups: Groups) -> int:
    """Experts of a token: no more than the allowed groups have."""
    return fields.count("num_experts_per_tok", most=num_experts // groups.count * groups.allowed)
