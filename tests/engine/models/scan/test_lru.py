"""The recurrence by doubling against token after token in float64."""

from __future__ import annotations

import pytest
import torch

from engine.models.scan.lru import linear_recurrence

TOKENS, CHANNELS = 150, 6


def drawn(decay: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, TOKENS, CHANNELS, generator=generator)
    a = torch.rand(2, TOKENS, CHANNELS, generator=generator)
    if decay == "whole":
        a = a.round()
    elif decay == "weak":
        a = 1 - 1e-4 * a
    return torch.randn(2, CHANNELS, generator=generator), x, a


def recurrence(state: torch.Tensor, x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    h, out = state.double(), []
    for t in range(x.shape[1]):
        h = a[:, t].double() * h + x[:, t].double()
        out.append(h)
    return torch.stack(out, 1)


@pytest.mark.parametrize("decay", ["usual", "whole", "weak"])
@pytest.mark.parametrize("counts", [(TOKENS,), (1,) * TOKENS, (63, 2, 1, 15, 17, 52)])
def test_doubling_is_the_recurrence(decay: str, counts: tuple[int, ...]) -> None:
    state, x, a = drawn(decay)
    expected = recurrence(state, x, a)
    outs, at = [], 0
    for count in counts:
        rows = slice(at, at + count)
        out, states = linear_recurrence((at, at), state, x[:, rows], a[:, rows], 1)
        state = states[:, -1]
        outs.append(out)
        at += count
    assert torch.allclose(torch.cat(outs, 1).double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(state, outs[-1][:, -1])


@pytest.mark.parametrize(("num_tokens", "newest"), [(1, 1), (5, 5), (9, 9), (70, 9), (150, 5)])
def test_each_of_the_newest_states_is_that_of_a_scan_that_stops_there(num_tokens: int, newest: int) -> None:
    """However many follow, doubling adds up what comes before a token in the same order."""
    state, x, a = drawn("usual")
    expected = recurrence(state, x, a)
    _, states = linear_recurrence((7, 12), state, x[:, :num_tokens], a[:, :num_tokens], newest)
    for at in range(newest):
        stop = num_tokens - newest + 1 + at
        _, there = linear_recurrence((7, 12), state, x[:, :stop], a[:, :stop], 1)
        assert torch.equal(states[:, at], there[:, -1])
        assert torch.allclose(states[:, at].double(), expected[:, stop - 1], rtol=1e-5, atol=1e-5)
