"""The scan against the recurrence in float64, and under every cut of the tokens."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.models.scan.pieces import in_pieces
from engine.models.scan.selective import selective

SEGMENTS, CHANNELS, D_STATE = 2, 5, 3
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def drawn(num_tokens: int, strength: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, Inputs]:
    """Rates, a state, and x, step sizes, b and c."""
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    x, dt = some(SEGMENTS, num_tokens, CHANNELS), some(SEGMENTS, num_tokens, CHANNELS).abs()
    b, c = some(2, SEGMENTS, num_tokens, D_STATE)
    rate = -strength * some(CHANNELS, D_STATE).abs()
    return rate, some(SEGMENTS, CHANNELS, D_STATE), (x, dt, b, c)


@pytest.mark.parametrize("num_tokens", [1, 2, 64])
@pytest.mark.parametrize("strength", [0.0, 1.0, 1e38])
def test_it_is_the_recurrence(num_tokens: int, strength: float) -> None:
    rate, state, inputs = drawn(num_tokens, strength)
    ours, after = selective(rate, state, *inputs)
    wide = state.double()
    x, dt, b, c = (part.double() for part in inputs)
    for t in range(num_tokens):
        step = dt[:, t, :, None]
        wide = (step * rate.double()).exp() * wide + step * x[:, t, :, None] * b[:, t, None]
        assert torch.allclose(ours[:, t].double(), (wide * c[:, t, None]).sum(-1), atol=1e-4)
    assert torch.allclose(after.double(), wide, atol=1e-4)


@given(start=st.integers(0, 70), num_tokens=st.integers(1, 40), cut=st.integers(1, 40))
def test_values_do_not_depend_on_cuts(start: int, num_tokens: int, cut: int) -> None:
    rate, state, inputs = drawn(num_tokens)
    before = state.clone()
    law = functools.partial(selective, rate)
    ours, states = in_pieces(law, state, inputs, (start, start + 5), 1, piece=cut)
    whole, last = selective(rate, state, *inputs)
    assert torch.equal(ours, whole)
    assert torch.equal(states[:, -1], last)
    assert torch.equal(state, before), "what was given stays as it was"


@given(num_tokens=st.integers(1, 40), newest=st.integers(1, 9))
def test_each_of_the_newest_states_is_that_of_a_scan_that_stops_there(num_tokens: int, newest: int) -> None:
    newest = min(newest, num_tokens)
    rate, state, inputs = drawn(num_tokens)
    _, states = in_pieces(functools.partial(selective, rate), state, inputs, (7, 12), newest)
    for at in range(newest):
        stop = num_tokens - newest + 1 + at
        _, there = selective(rate, state, *(part[:, :stop] for part in inputs))
        assert torch.equal(states[:, at], there)
