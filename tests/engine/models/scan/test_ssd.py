"""The matrix form against the recurrence, token by token in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.models.scan.pieces import in_pieces
from engine.models.scan.ssd import _piece, _step, ssd

SEGMENTS, HEADS, SIZE, GROUPS, D_STATE = 2, 6, 4, 2, 5
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def drawn(num_tokens: int, strength: float = 1.0, seed: int = 0) -> tuple[torch.Tensor, Inputs]:
    """A state, and x, decays, b and c."""
    generator = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    decay = -strength * some(SEGMENTS, num_tokens, HEADS).abs()
    x = some(SEGMENTS, num_tokens, HEADS, SIZE)
    b, c = some(2, SEGMENTS, num_tokens, GROUPS, D_STATE)
    return some(SEGMENTS, HEADS, SIZE, D_STATE), (x, decay, b, c)


def one_by_one(state: torch.Tensor, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, in float64."""
    state = state.double()
    x, decay, b, c = (part.double() for part in inputs)
    b, c = (part.repeat_interleave(HEADS // GROUPS, 2) for part in (b, c))
    out = []
    for t in range(x.shape[1]):
        state = decay[:, t].exp()[..., None, None] * state + x[:, t, :, :, None] * b[:, t, :, None]
        out.append((state @ c[:, t, :, :, None])[..., 0])
    return torch.stack(out, 1), state


@pytest.mark.parametrize("num_tokens", [1, 2, 17, 64])
@pytest.mark.parametrize("strength", [0.0, 0.01, 1.0, 300.0])
def test_it_is_the_recurrence(num_tokens: int, strength: float) -> None:
    state, inputs = drawn(num_tokens, strength)
    ours, after = ssd(state, *inputs)
    theirs, their_after = one_by_one(state, inputs)
    assert (ours - theirs).abs().max() <= 2e-6 * theirs.abs().max()
    assert (after - their_after).abs().max() <= 2e-6 * their_after.abs().max()


def test_a_strong_decay_does_not_blur_the_weak_ones_behind_it() -> None:
    state, (x, decay, b, c) = drawn(32, strength=0.01)
    decay[:, 3] = -1e6
    ours, _ = ssd(state, x, decay, b, c)
    theirs, _ = one_by_one(state, (x, decay, b, c))
    assert (ours - theirs).abs().max() <= 2e-6 * theirs.abs().max()


def test_no_decay_however_strong_makes_a_number_that_is_none() -> None:
    state, (x, decay, b, c) = drawn(16)
    ours, after = ssd(state, x, torch.full_like(decay, -3e38), b, c)
    assert ours.isfinite().all()
    assert after.isfinite().all()


def test_a_piece_of_one_token_has_the_bits_of_any_piece() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 1, 3, 5, 8), (2, 1, 3, 1, 5), (2, 1, 3, 1), (2, 1, 1, 1, 8), (2, 1, 1, 1, 8))
    before, values, decay, keys, queries = (torch.randn(shape, generator=generator) for shape in shapes)
    ours, theirs = (law(before, values, -decay.abs(), keys, queries) for law in (_step, _piece))
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


@given(start=st.integers(0, 70), num_tokens=st.integers(1, 80))
def test_pieces_make_no_difference(start: int, num_tokens: int) -> None:
    state, inputs = drawn(num_tokens)
    ours, states = in_pieces(ssd, state, inputs, (start, start + 5), 1, piece=8)
    theirs, their_after = one_by_one(state, inputs)
    assert (ours - theirs).abs().max() <= 2e-6 * theirs.abs().max()
    assert (states[:, -1] - their_after).abs().max() <= 2e-6 * their_after.abs().max()


@pytest.mark.parametrize(("num_tokens", "newest"), [(1, 1), (5, 5), (9, 9), (70, 9), (150, 5)])
def test_each_of_the_newest_states_is_that_of_a_scan_that_stops_there(num_tokens: int, newest: int) -> None:
    state, inputs = drawn(num_tokens)
    _, states = in_pieces(ssd, state, inputs, (7, 12), newest)
    for at in range(newest):
        stop = num_tokens - newest + 1 + at
        rows = tuple(part[:, :stop] for part in inputs)
        _, there = in_pieces(ssd, state, rows, (7, 12), at + 1)
        assert torch.equal(states[:, at], there[:, -1])
        _, theirs = one_by_one(state, rows)
        assert (states[:, at] - theirs).abs().max() <= 2e-6 * theirs.abs().max()
