"""The gated delta rule: a state of keys and values that forgets a little, and corrects what it said of a key.

Gated DeltaNet (Yang, Kautz & Hatamizadeh 2024) with one decay a head, and Kimi Delta Attention (Kimi Linear
technical report, 2025) with one a channel of the key:

    S <- exp(g) S;   u = beta (v - k S);   S <- S + k u;   o = q S

computed for a piece of tokens at once: the u of a piece solve a triangular system (the WY form of Yang et
al. 2024). Only sums of g, which are never positive, are exponentiated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.models.scan.pieces import in_pieces

#: Tokens of a piece where every channel has its own decay: there is one for every two tokens and channel.
PIECE_OF_CHANNELS = 16


def gated_delta_rule(
    starts: Sequence[int],
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    newest: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All float32: `q` and `k` [segments, tokens, heads, key size], `v` [.., heads, value size], `beta`
    [.., heads], and g, `log_decay`, which is never positive: [.., heads], or [.., heads, key size] where
    every channel has its own. `state` [segments, heads, key size, value size] stands before `starts`, the
    position of each segment's first token.

    Returns o [segments, tokens, heads, value size] and the states after the `newest` last tokens, [segments,
    newest, heads, key size, value size]. Nothing is scaled or normalised here.
    """
    inputs = (q, k, v, log_decay, beta)
    if log_decay.dim() == beta.dim():
        return in_pieces(_by_head, state, inputs, starts, newest)
    return in_pieces(_by_channel, state, inputs, starts, newest, PIECE_OF_CHANNELS)


def unit(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x over its length, along the last axis; `eps` is added to the square of the length."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def _by_head(state: torch.Tensor, *rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, log_decay, beta = (row.transpose(1, 2) for row in rows)
    if q.shape[2] == 1:
        return _step(state, q, k, v, beta, log_decay[..., None])
    kept = _kept(log_decay[..., None])[..., 0]
    among = kept[..., 1:]
    keys = k.transpose(-1, -2)
    return _solve(state, q, k, v, beta, (k @ keys) * among, (q @ keys) * among, kept[..., None])


def _by_channel(state: torch.Tensor, *rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, log_decay, beta = (row.transpose(1, 2) for row in rows)
    if q.shape[2] == 1:
        return _step(state, q, k, v, beta, log_decay)
    kept = _kept(log_decay)
    keys = kept[..., 1:, :] * k[..., None, :, :]
    products = torch.stack((k, q), dim=-2) @ keys.transpose(-1, -2)
    return _solve(state, q, k, v, beta, products[..., 0, :], products[..., 1, :], kept)


def _step(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    log_decay: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A piece of one token: the products of `_solve` and so the same bits, without the factors that are 1."""
    kept = log_decay.exp()
    read, keys = torch.cat((k * kept, q * kept), dim=-2) @ state, k.transpose(-1, -2)
    u = (v - read[..., :1, :]) * beta[..., None]
    out = read[..., 1:, :] + (q @ keys) @ u
    return out.transpose(1, 2), state * kept.transpose(-1, -2) + keys @ u


def _kept(log_decay: torch.Tensor) -> torch.Tensor:
    """What is left of an earlier token when a later one reads, for `log_decay` [.., tokens, channels]:
    [.., tokens, 1 + tokens, channels] by reader and writer. The first writer is all that came before the
    piece, then every token of it.

    Every span is summed by itself: in the difference of two running sums a strong decay would drown the
    weak ones behind it.
    """
    num_tokens = log_decay.shape[-2]
    ones = torch.ones((num_tokens, num_tokens + 1), dtype=torch.bool, device=log_decay.device)
    spans = log_decay[..., None, :].masked_fill(~ones.tril()[..., None], 0.0).cumsum(-3)
    return spans.masked_fill_(~ones.tril(1)[..., None], -torch.inf).exp_()


def _solve(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    k_k: torch.Tensor,
    q_k: torch.Tensor,
    kept: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`k_k` and `q_k` [.., tokens, tokens] are products of keys and of queries with the keys that are left of
    each token; `kept` is that of `_kept`."""
    num_tokens, from_before = k.shape[-2], kept[..., 0, :]
    read = torch.cat((k * from_before, q * from_before), dim=-2) @ state
    rate = beta[..., None]
    # The diagonal counts as ones, and what is above it is not read.
    u = torch.linalg.solve_triangular(
        k_k * rate, (v - read[..., :num_tokens, :]) * rate, upper=False, unitriangular=True
    )
    out = read[..., num_tokens:, :] + q_k @ u
    written = (k * kept[..., -1, 1:, :]).transpose(-1, -2) @ u
    return out.transpose(1, 2), state * from_before[..., -1, :, None] + written
