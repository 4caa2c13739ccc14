"""Mamba-2's recurrence (Dao & Gu 2024, "Transformers are SSMs", section 6) over one piece of tokens.

For each head, with decay exp(a_t), a_t <= 0, and keys and queries B and C that a group of heads shares:

    state_t = exp(a_t) * state_{t-1} + x_t B_t^T        y_t = state_t C_t

Within a piece this is masked attention whose weights are products of decays; between pieces it is the state.
"""

from __future__ import annotations

import torch


def ssd(
    state: torch.Tensor, x: torch.Tensor, decay: torch.Tensor, b: torch.Tensor, c: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`state` [segments, heads, head size, d_state]; `x` [segments, tokens, heads, head size], times the size
    of the step; `decay` [segments, tokens, heads], logarithms of at most 0; `b` and `c` [segments, tokens,
    groups, d_state]. All float32. Returns y, shaped like x, and the state after the piece.

    Decays between two tokens are differences of logarithms, so that none exceeds 1 and a strong one makes 0.
    """
    num_segments, num_tokens, num_heads, size = x.shape
    num_groups, d_state = b.shape[2:]
    heads = num_segments, num_groups, num_heads // num_groups
    law = _step if num_tokens == 1 else _piece
    y, after = law(
        state.view(*heads, size, d_state),
        x.movedim(1, 2).reshape(*heads, num_tokens, size),
        decay.movedim(1, 2).reshape(*heads, num_tokens),
        b.movedim(1, 2)[:, :, None],
        c.movedim(1, 2)[:, :, None],
    )
    return y.view(num_segments, num_heads, num_tokens, size).movedim(1, 2), after.view(state.shape)


def _piece(
    before: torch.Tensor, values: torch.Tensor, decay: torch.Tensor, keys: torch.Tensor, queries: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`before` [.., size, d_state], `values` [.., tokens, size], `decay` [.., tokens], `keys` and `queries`
    [.., tokens, d_state]; all begin with [segments, groups, heads of a group]."""
    # Sums in float64: after a token of strong decay, differences of small ones would be lost.
    since_start = decay.double().cumsum(-1)
    kept = since_start.float().exp()[..., None]
    left = (since_start[..., -1:] - since_start).float().exp()[..., None]
    y = (queries @ keys.mT * _between(since_start)) @ values + kept * (queries @ before.mT)
    return y, kept[..., -1:, :] * before + (left * values).mT @ keys


def _step(
    before: torch.Tensor, values: torch.Tensor, decay: torch.Tensor, keys: torch.Tensor, queries: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_piece` of one token: the same products and so the same bits, without the factors that are 1."""
    kept = decay.exp()[..., None]
    y = (queries @ keys.mT) @ values + kept * (queries @ before.mT)
    return y, kept * before + values.mT @ keys


def _between(since_start: torch.Tensor) -> torch.Tensor:
    """Decay from each token (last axis) to each one not before it (last but one); 0 for the others."""
    gaps = since_start[..., :, None] - since_start[..., None, :]
    causal = torch.ones(gaps.shape[-2:], dtype=torch.bool, device=gaps.device).tril()
    return gaps.float().masked_fill(~causal, -torch.inf).exp()
