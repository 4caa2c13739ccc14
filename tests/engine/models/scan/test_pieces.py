"""Cuts fall at multiples of a piece, and what stands beside a segment does not change it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.models.scan.pieces import bounds_of, in_pieces


@given(start=st.integers(0, 50), num_tokens=st.integers(1, 50), piece=st.integers(1, 9))
def test_cuts_are_the_multiples_within(start: int, num_tokens: int, piece: int) -> None:
    inner = [at for at in range(1, num_tokens) if (start + at) % piece == 0]
    assert bounds_of(start, num_tokens, 1, piece) == (0, *inner, num_tokens)


@given(start=st.integers(0, 50), num_tokens=st.integers(1, 50), newest=st.integers(1, 50))
def test_each_of_the_newest_tokens_ends_a_piece(start: int, num_tokens: int, newest: int) -> None:
    newest = min(newest, num_tokens)
    bounds = bounds_of(start, num_tokens, newest, 8)
    whole = num_tokens - newest + 1
    assert bounds[-newest:] == tuple(range(whole, num_tokens + 1))
    assert bounds[: -newest + 1 or None] == bounds_of(start, whole, 1, 8)


def law(state: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Running sums, and a mark at the first token of every piece."""
    out = state[:, None] + x.cumsum(1)
    first = torch.zeros_like(out)
    first[:, 0] = 1000
    return out + first, out[:, -1]


@given(
    starts=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    num_tokens=st.integers(1, 20),
    newest=st.integers(1, 20),
)
def test_every_segment_is_scanned_as_if_it_were_alone(
    starts: list[int], num_tokens: int, newest: int
) -> None:
    newest = min(newest, num_tokens)
    x = torch.arange(len(starts) * num_tokens, dtype=torch.float64).view(len(starts), num_tokens)
    state = torch.arange(len(starts), dtype=torch.float64)
    out, states = in_pieces(law, state, (x,), starts, newest, piece=8)
    assert states.shape == (len(starts), newest)
    for at, start in enumerate(starts):
        alone, states_alone = in_pieces(law, state[at : at + 1], (x[at : at + 1],), (start,), newest, piece=8)
        assert torch.equal(out[at], alone[0])
        assert torch.equal(states[at], states_alone[0])


@given(start=st.integers(0, 20), num_tokens=st.integers(1, 20), newest=st.integers(1, 20))
def test_each_state_is_that_of_a_scan_that_stops_there(start: int, num_tokens: int, newest: int) -> None:
    newest = min(newest, num_tokens)
    x = torch.arange(1.0, num_tokens + 1)[None]
    _, states = in_pieces(law, torch.zeros(1), (x,), (start,), newest, piece=8)
    for at in range(newest):
        stop = num_tokens - newest + 1 + at
        assert states[0, at] == x[0, :stop].sum()
