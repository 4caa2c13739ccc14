"""Experts as the hub has them: three matrices of each, under names of their own, as a rule.

Ranks share the inner columns of every expert, not the experts: so they have the same to do, whichever are
chosen.
"""

from __future__ import annotations

import torch

from engine.models.layers import Activation
from engine.models.loading import Loader, own
from engine.models.moe import Experts
from engine.parallel.share import moved, values_of

#: what most families call the matrices of the gate, up and down
GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")


def hub_experts(
    load: Loader,
    prefix: str,
    num_experts: int,
    inner: int,
    width: int,
    activation: Activation,
    names: tuple[str, str, str] = GATE_UP_DOWN,
) -> Experts:
    """`prefix`.0 and those behind it, each a gated feed-forward of `inner` values; or all of them in two
    tensors, gates before ups, as transformers keeps them and some files do."""
    if load.has(f"{prefix}.gate_up_proj"):
        return divided_experts(
            load,
            load.tensor(f"{prefix}.gate_up_proj", num_experts, 2 * inner, width),
            load.tensor(f"{prefix}.down_proj", num_experts, width, inner),
            activation,
        )
    gate, up, down = names
    experts = [f"{prefix}.{expert}" for expert in range(num_experts)]
    shapes = {gate: (inner, width), up: (inner, width), down: (width, inner)}

    def matrix(expert: str, name: str) -> torch.Tensor:
        return load.tensor(f"{expert}.{name}.weight", *shapes[name])

    pairs = [
        inner_columns(load, torch.cat((matrix(expert, gate), matrix(expert, up))), matrix(expert, down))
        for expert in experts
    ]
    gates, downs = zip(*pairs, strict=True)
    return Experts(torch.stack(gates), torch.stack(downs), activation, load.ranks)


def divided_experts(
    load: Loader, gate_up: torch.Tensor, down: torch.Tensor, activation: Activation
) -> Experts:
    """Of all experts' `gate_up` [experts, 2 * inner, width] and `down` [experts, width, inner]."""
    return Experts(*inner_columns(load, gate_up, down), activation, load.ranks)


def inner_columns(
    load: Loader, gate_up: torch.Tensor, down: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's inner columns of gated feed-forwards: of `gate_up` [..., 2 * inner, width], gates before
    ups, and `down` [..., width, inner]."""
    if load.share.size == 1:
        return gate_up.contiguous(), down.contiguous()
    inner = down.shape[-1]
    mine = values_of(load.share.columns(inner), 1)
    both = torch.cat((gate_up[..., mine, :], gate_up[..., moved(mine, inner), :]), -2)
    return both, own(down[..., mine])
