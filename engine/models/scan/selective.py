"""Mamba's recurrence (Gu & Dao 2023, "Mamba", section 3) over one piece of tokens.

Every channel has a row of state whose values decay at rates of their own, so that no product of matrices
stands for several steps: tokens are gone through one by one, everything else side by side.
"""

from __future__ import annotations

import torch


def selective(
    rate: torch.Tensor,
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rate` [channels, d_state], negative; `state` [segments, channels, d_state]; `x` and step sizes `dt`
    [segments, tokens, channels]; `b` and `c` [segments, tokens, d_state]. All float32.

        state_t = exp(dt_t * rate) * state_{t-1} + dt_t x_t b_t^T        y_t = state_t c_t

    Returns y, shaped like x, and the state after the piece. Values do not depend on how tokens are cut.
    """
    decay = (dt[..., None] * rate).exp()
    states = (dt * x)[..., None] * b[:, :, None]
    for token in range(x.shape[1]):
        state = states[:, token].addcmul_(decay[:, token], state)
    return (states * c[:, :, None]).sum(-1), state.clone()
