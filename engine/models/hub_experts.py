"""Experts as the hub has them: three matrices of each, under names of their own, as a rule."""

from __future__ import annotations

import torch

from engine.models.layers import Activation
from engine.models.loading import Loader
from engine.models.moe import Experts

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
        return Experts(
            load.tensor(f"{prefix}.gate_up_proj", num_experts, 2 * inner, width),
            load.tensor(f"{prefix}.down_proj", num_experts, width, inner),
            activation,
        )
    gate, up, down = names
    gates, downs = [], []
    for expert in range(num_experts):
        gates.append(
            torch.cat([load.tensor(f"{prefix}.{expert}.{name}.weight", inner, width) for name in (gate, up)])
        )
        downs.append(load.tensor(f"{prefix}.{expert}.{down}.weight", width, inner))
    return Experts(torch.stack(gates), torch.stack(downs), activation)
