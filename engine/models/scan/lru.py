"""Linear recurrences of single values: h_t = a_t h_{t-1} + x_t in every channel, with 0 <= a <= 1."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.models.scan.pieces import in_pieces


def linear_recurrence(
    starts: Sequence[int], state: torch.Tensor, x: torch.Tensor, a: torch.Tensor, newest: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` and `a` float32 [segments, tokens, channels] after `state` [segments, channels], which stands
    before `starts`, the position of each segment's first token. Returns every h, like x, and the `newest`
    last of them, [segments, newest, channels]."""
    hidden, _ = in_pieces(_law, state, (x, a), starts, 1)
    return hidden, hidden[:, -newest:]


def _law(state: torch.Tensor, x: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """By doubling: what a token got from those up to n before it becomes what it got from 2n (Hillis & Steele
    1986). Nothing is divided by, so that decays may be 0."""
    # The state joins the first token, and what came before it is gone then.
    x = torch.cat((torch.addcmul(x[:, :1], a[:, :1], state[:, None]), x[:, 1:]), dim=1)
    reach = 1
    while reach < x.shape[1]:
        x = torch.cat((x[:, :reach], torch.addcmul(x[:, reach:], a[:, reach:], x[:, :-reach])), dim=1)
        a = torch.cat((a[:, :reach], a[:, reach:] * a[:, :-reach]), dim=1)
        reach *= 2
    return x, x[:, -1]
