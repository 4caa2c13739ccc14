"""The convolution against torch's own, and under every cut of the tokens."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from engine.models.conv import ShortConv

CHANNELS, TOKENS = 6, 20


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kernel", [2, 3, 4])
@pytest.mark.parametrize("has_bias", [False, True])
def test_it_is_the_causal_convolution(kernel: int, has_bias: bool) -> None:
    weight, bias = drawn(CHANNELS, kernel), drawn(CHANNELS, seed=1) if has_bias else None
    conv, x = ShortConv(weight, bias), drawn(2, TOKENS, CHANNELS, seed=2)
    ours, _ = conv(x, torch.zeros(2, *conv.state_shape), 1)
    padded = F.pad(x.transpose(1, 2), (kernel - 1, 0))
    theirs = F.conv1d(padded, weight[:, None], bias, groups=CHANNELS).transpose(1, 2)
    assert torch.allclose(ours, theirs, atol=1e-5)


@given(cuts=st.lists(st.integers(1, TOKENS - 1), max_size=6))
def test_values_do_not_depend_on_how_tokens_are_cut(cuts: list[int]) -> None:
    conv, x = ShortConv(drawn(CHANNELS, 4), drawn(CHANNELS, seed=1)), drawn(2, TOKENS, CHANNELS, seed=2)
    state = torch.zeros(2, *conv.state_shape)
    whole, last = conv(x, state, 1)
    pieces = []
    bounds = sorted({0, TOKENS, *cuts})
    for start, stop in itertools.pairwise(bounds):
        piece, states = conv(x[:, start:stop], state, 1)
        state = states[:, -1]
        pieces.append(piece)
    assert torch.equal(torch.cat(pieces, 1), whole)
    assert torch.equal(state, last[:, -1])


def test_the_state_is_the_last_inputs() -> None:
    conv, x = ShortConv(drawn(CHANNELS, 4)), drawn(1, TOKENS, CHANNELS)
    _, states = conv(x, torch.zeros(1, *conv.state_shape), 1)
    assert torch.equal(states[:, -1], x[:, -3:])


@pytest.mark.parametrize("newest", [1, 2, 5])
def test_each_of_the_newest_states_is_the_last_inputs_there(newest: int) -> None:
    conv, x = ShortConv(drawn(CHANNELS, 4)), drawn(2, 5, CHANNELS)
    before = drawn(2, 3, CHANNELS, seed=1)
    _, states = conv(x, before, newest)
    assert states.shape == (2, newest, *conv.state_shape)
    for at in range(newest):
        _, there = conv(x[:, : 5 - newest + 1 + at], before, 1)
        assert torch.equal(states[:, at], there[:, -1])
