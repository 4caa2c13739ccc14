"""The gated delta rule in pieces against the recurrence itself, token by token in float64."""

from __future__ import annotations

import pytest
import torch

from engine.models.scan.delta import _kept, _solve, _step, gated_delta_rule, unit

HEADS, KEY, VALUE, TOKENS = 3, 8, 5, 150
#: log decays: hardly any, ordinary ones, such that nothing is left after a token, and all of them mixed
DECAYS = {"none": 0.0, "weak": 1e-6, "usual": 0.3, "strong": 300.0, "total": torch.inf}

Rows = tuple[torch.Tensor, ...]


def drawn(decay: str, by_channel: bool, segments: int = 1, seed: int = 0) -> Rows:
    """q, k, v, log decay, beta of all tokens, and a state."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn((segments, *shape), generator=generator)

    shape = (TOKENS, HEADS, KEY) if by_channel else (TOKENS, HEADS)
    if decay == "mixed":
        scales = torch.tensor([0.0, 1e-6, 0.3, 0.3, 300.0, 1e12])
        scale = scales[torch.randint(len(scales), (segments, *shape), generator=generator)]
    else:
        scale = torch.tensor(DECAYS[decay])
    log_decay = -scale * (0.1 + normal(*shape).abs()) if decay != "none" else torch.zeros(segments, *shape)
    beta = 2 * torch.sigmoid(normal(TOKENS, HEADS))
    q, k = unit(normal(TOKENS, HEADS, KEY)), unit(normal(TOKENS, HEADS, KEY))
    return q, k, normal(TOKENS, HEADS, VALUE), log_decay, beta, normal(HEADS, KEY, VALUE)


def recurrence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor) -> Rows:
    """One token after another, in float64."""
    log_decay, beta, state = (x.double() for x in rest)
    q, k, v = q.double(), k.double(), v.double()
    if log_decay.dim() == 3:
        log_decay = log_decay[..., None]
    outs = []
    for t in range(q.shape[1]):
        state = state * log_decay[:, t].exp()[..., None]
        said = torch.einsum("shk,shkv->shv", k[:, t], state)
        correction = (v[:, t] - said) * beta[:, t, :, None]
        state = state + k[:, t, :, :, None] * correction[:, :, None]
        outs.append(torch.einsum("shk,shkv->shv", q[:, t], state))
    return torch.stack(outs, 1), state


def in_cuts(starts: tuple[int, ...], rows: Rows, counts: tuple[int, ...]) -> Rows:
    """Passes of `counts` tokens, one after another; the first token of all is at `starts`."""
    *inputs, state = rows
    outs, at = [], 0
    for count in counts:
        now = [row[:, at : at + count] for row in inputs]
        out, states = gated_delta_rule([start + at for start in starts], state, *now, 1)
        state = states[:, -1]
        outs.append(out)
        at += count
    return torch.cat(outs, 1), state


@pytest.mark.parametrize("decay", [*DECAYS, "mixed"])
@pytest.mark.parametrize("by_channel", [False, True], ids=["heads", "channels"])
@pytest.mark.parametrize(
    "counts",
    [(TOKENS,), (1,) * TOKENS, (63, 2, 1, 15, 17, 52)],
    ids=["full", "decode", "irregular"],
)
def test_pieces_are_the_recurrence(decay: str, by_channel: bool, counts: tuple[int, ...]) -> None:
    rows = drawn(decay, by_channel)
    out, state = in_cuts((0,), rows, counts)
    expected, last = recurrence(*rows)
    assert torch.allclose(out.double(), expected, atol=1e-5)
    assert torch.allclose(state.double(), last, atol=1e-5)


@pytest.mark.parametrize("by_channel", [False, True], ids=["heads", "channels"])
def test_sequences_side_by_side_are_the_sequences_alone(by_channel: bool) -> None:
    rows = drawn("usual", by_channel, segments=3)
    expected, last = recurrence(*rows)
    for starts in ((0, 0, 0), (64, 0, 640), (5, 0, 63)):
        out, state = in_cuts(starts, rows, (100, 50))
        assert torch.allclose(out.double(), expected, atol=1e-5)
        assert torch.allclose(state.double(), last, atol=1e-5)


@pytest.mark.parametrize("by_channel", [False, True], ids=["heads", "channels"])
@pytest.mark.parametrize("start", [0, 40])
def test_a_pass_that_begins_where_a_piece_does_changes_no_bit(start: int, by_channel: bool) -> None:
    rows = drawn("usual", by_channel)
    whole, last = in_cuts((start,), rows, (TOKENS,))
    first = 64 - start % 64
    cut, state = in_cuts((start,), rows, (first, 64, TOKENS - first - 64))
    assert torch.equal(whole, cut)
    assert torch.equal(last, state)


@pytest.mark.parametrize("by_channel", [False, True], ids=["heads", "channels"])
@pytest.mark.parametrize(("num_tokens", "newest"), [(1, 1), (5, 5), (9, 9), (70, 9), (150, 5)])
def test_each_of_the_newest_states_is_that_of_a_scan_that_stops_there(
    num_tokens: int, newest: int, by_channel: bool
) -> None:
    *inputs, state = drawn("usual", by_channel, segments=2)
    _, states = gated_delta_rule((7, 12), state, *(row[:, :num_tokens] for row in inputs), newest)
    for at in range(newest):
        rows = [row[:, : num_tokens - newest + 1 + at] for row in inputs]
        _, there = gated_delta_rule((7, 12), state, *rows, at + 1)
        assert torch.equal(states[:, at], there[:, -1])
        _, expected = recurrence(*rows, state)
        assert torch.allclose(states[:, at].double(), expected, atol=1e-5)


@pytest.mark.parametrize("by_channel", [False, True], ids=["heads", "channels"])
def test_a_piece_of_one_token_has_the_bits_of_any_piece(by_channel: bool) -> None:
    *inputs, state = drawn("usual", by_channel, segments=2)
    q, k, v, log_decay, beta = (row[:, :1].transpose(1, 2) for row in inputs)
    channels = log_decay if by_channel else log_decay[..., None]
    kept, keys = _kept(channels), k.transpose(-1, -2)
    theirs = _solve(state, q, k, v, beta, k @ keys, q @ keys, kept)
    ours = _step(state, q, k, v, beta, channels)
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


def test_a_weak_decay_after_a_strong_one_is_not_drowned() -> None:
    """In the difference of two running sums of 32 bits, 1e-3 beside 3e5 would be nothing."""
    q, k, v, log_decay, beta, state = drawn("none", by_channel=False)
    log_decay[:, :] = -1e-3
    log_decay[:, 3] = -3e5
    rows = (q, k, v, log_decay, beta, state)
    out, _ = in_cuts((0,), rows, (TOKENS,))
    assert torch.allclose(out.double(), recurrence(*rows)[0], atol=1e-5)


def test_unit_vectors_have_length_one_and_zero_stays_zero() -> None:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(unit(x).norm(dim=-1), torch.ones(4), atol=1e-5)
    assert unit(torch.zeros(2, 16)).abs().max() == 0
