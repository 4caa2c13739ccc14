"""Mixtures of experts: which experts a token goes to is the family's law, what they compute is the same."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from engine.models.layers import Activation
from engine.parallel.ranks import ALONE, Ranks
from engine.shapes import shapes_are_fixed


class Experts:
    """Gated feed-forward experts.

    `gate_up` [experts, 2 * inner, width] holds the gate's rows, then those of up; `down` is [experts, width,
    inner]. Where `ranks` share the inner columns each has some of them, and outputs are totals.
    """

    def __init__(
        self, gate_up: torch.Tensor, down: torch.Tensor, activation: Activation, ranks: Ranks = ALONE
    ) -> None:
        self._gate_up = gate_up
        self._down = down
        self._activation = activation
        self.ranks = ranks

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """See `by_expert`."""
        return self.ranks.total(by_expert(x, chosen, weights, self.expert))

    def expert(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        """What one of them makes of `rows` [n, width] in the model's dtype; of a total one term."""
        gate, up = F.linear(rows, self._gate_up[expert]).chunk(2, -1)
        return F.linear(self._activation(gate) * up, self._down[expert])


def by_expert(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    expert: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """x [tokens, width] in the model's dtype; `chosen` [tokens, k] numbers of experts, and float32
    `weights` [tokens, k] of their outputs. `expert` maps its number and rows of x to rows of the same width.
    Returns float32 [tokens, width].

    Tokens are gathered by expert, so that each expert is read once; outputs of a token are summed in
    the order in which its experts were chosen. Where shapes are fixed an expert computes all tokens.
    """
    num_tokens, k = chosen.shape
    flat = chosen.reshape(-1)
    order = flat.argsort(stable=True)
    out = torch.empty((num_tokens * k, x.shape[1]), dtype=torch.float32, device=x.device)
    experts, counts = torch.unique_consecutive(flat[order], return_counts=True)
    start, fixed = 0, shapes_are_fixed()
    for number, count in zip(experts.tolist(), counts.tolist(), strict=True):
        rows = order[start : start + count]
        start += count
        tokens = rows // k
        out[rows] = (expert(number, x)[tokens] if fixed else expert(number, x[tokens])).float()
    return (out.view(num_tokens, k, -1) * weights[:, :, None]).sum(1)
