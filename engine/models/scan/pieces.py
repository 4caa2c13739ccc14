"""Recurrences in pieces that are cut at fixed positions, so that a prompt is scanned alike however long the
passes are that it is read in."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence

import torch

from engine.cache.memory import View

#: Tokens of a piece, counted from position 0: a square of them for every head must fit into the caches.
PIECE = 64

#: (state [segments, ...], inputs [segments, tokens, ...] of one piece) -> (output [segments, tokens, ...],
#: the state after it)
Law = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def starts_of(view: View) -> tuple[int, ...]:
    """The position of each segment's first token."""
    return tuple(int(view.positions[segment.start]) for segment in view.segments)


def bounds_of(start: int, num_tokens: int, newest: int, piece: int = PIECE) -> tuple[int, ...]:
    """Where tokens [0, num_tokens) are cut, both ends among them, if the first is at position `start`: also
    behind each of the `newest` last."""
    whole = num_tokens - newest + 1
    inner = range(piece - start % piece, whole, piece)
    return (0, *inner, *range(whole, num_tokens + 1))


def in_pieces(
    law: Law,
    state: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    starts: Sequence[int],
    newest: int,
    piece: int = PIECE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`law` over all of `inputs` [segments, tokens, ...] from `state` on: its output, and the states
    [segments, newest, ...] after the `newest` last tokens. What is before those is scanned in pieces, and
    each further token by itself.

    Segments whose cuts fall together are scanned side by side.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for segment, start in enumerate(starts):
        groups.setdefault(bounds_of(start, inputs[0].shape[1], newest, piece), []).append(segment)
    if len(groups) == 1:
        return _scan(law, state, inputs, next(iter(groups)), newest)
    outs: list[torch.Tensor] = []
    states: list[torch.Tensor] = []
    order = [segment for members in groups.values() for segment in members]
    for bounds, members in groups.items():
        out, last = _scan(law, state[members], [x[members] for x in inputs], bounds, newest)
        outs.append(out)
        states.append(last)
    back = [order.index(segment) for segment in range(len(starts))]
    return torch.cat(outs)[back], torch.cat(states)[back]


def _scan(
    law: Law, state: torch.Tensor, inputs: Sequence[torch.Tensor], bounds: tuple[int, ...], newest: int
) -> tuple[torch.Tensor, torch.Tensor]:
    outs = []
    states: deque[torch.Tensor] = deque(maxlen=newest)
    for start, stop in itertools.pairwise(bounds):
        out, state = law(state, *(x[:, start:stop] for x in inputs))
        outs.append(out)
        states.append(state)
    last = state[:, None] if newest == 1 else torch.stack(tuple(states), 1)
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1), last
