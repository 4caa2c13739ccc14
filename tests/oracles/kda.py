"""Kimi Delta Attention with Kimi K3's bounded forgetting, as the plain recurrence in float64: the library has
no class of it."""

from __future__ import annotations

import torch


def bounded_decays(f: torch.Tensor, log_speed: torch.Tensor, dt: torch.Tensor, bound: float) -> torch.Tensor:
    """float64 logarithms of decays: `f` [tokens, heads, size], `log_speed` [heads], `dt` [heads, size]."""
    speed = log_speed.double().exp()[:, None]
    return bound / (1 + torch.exp(-speed * (f.double() + dt.double())))


def recurrence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """float64 outputs [tokens, heads, size], one token after another from an empty state: rows
    [tokens, heads, size], `beta` [tokens, heads]."""
    q, k, v, beta = (x.double() for x in (q, k, v, beta))
    state = torch.zeros(*k.shape[1:], v.shape[-1], dtype=torch.float64)
    outs = []
    for t in range(len(q)):
        state = state * log_decay[t].exp()[..., None]
        error = v[t] - (state * k[t, ..., None]).sum(-2)
        state = state + (beta[t, :, None] * k[t])[..., None] * error[:, None]
        outs.append((state * q[t, ..., None]).sum(-2))
    return torch.stack(outs)
