"""What a drafter of a model's own layers knows of one sequence, beside its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from engine.errors import StateError
from engine.state import DraftState, PartSpec, Point, least_missed

#: The part of a state that has hidden states: one a depth.
HIDDEN = "mtp.hidden"
#: Places whose hidden states are kept of one sequence: it can be cut there as if nothing had followed.
MOST_PLACES = 64


@dataclass(slots=True)
class Followed:
    """There are rows of the target's tokens [origin, at). `tokens`, and float32 `hidden` [tokens, width], are
    those that follow, as far as the target has read: they wait.

    A hidden state that is not known, because the sequence was cut behind it, or read by another engine, is
    zeros, which no norm gives: its row is made of the token alone. `places` has the hidden states that
    followed some `at`, one a depth.
    """

    origin: int
    at: int
    tokens: list[int]
    hidden: torch.Tensor
    places: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """How many tokens the target has read."""
        return self.at + len(self.tokens)

    @property
    def sees_its_end(self) -> bool:
        """Whether it knows where the target stands."""
        return len(self.hidden) > 0 and bool(self.hidden[-1].any())

    def fork(self) -> Followed:
        return replace(self, tokens=list(self.tokens), places=dict(self.places))

    def wait(self, tokens: Sequence[int], hidden: torch.Tensor) -> None:
        """The target has read on."""
        self.tokens.extend(tokens)
        self.hidden = torch.cat((self.hidden, hidden))

    def go_on(self, count: int) -> None:
        """The first `count` of what waits have rows now."""
        self.at += count
        del self.tokens[:count]
        self.hidden = self.hidden[count:].clone()

    def go_back(self, at: int, tokens: Sequence[int]) -> None:
        """Rows from `at` on are not there any more: those of `tokens`, which wait again."""
        if tokens:
            unknown = self.hidden.new_zeros((len(tokens), self.hidden.shape[1]))
            joined = torch.cat((unknown, self.hidden))
            self.hidden = self.places.get(at, joined)
            self.tokens[:0] = tokens
            self.at = at
        self.places = {place: kept for place, kept in self.places.items() if place <= at}

    def end_at(self, length: int) -> None:
        """The target has read no more than `length` tokens."""
        del self.tokens[length - self.at :]
        self.hidden = self.hidden[: len(self.tokens)].clone()

    def keep_place(self) -> None:
        """What waits, one a depth, is kept; of too many places the one that is least missed goes."""
        self.places[self.at] = self.hidden
        if len(self.places) > MOST_PLACES:
            rising = sorted(self.places)
            del self.places[rising[least_missed(rising)]]

    def points(self) -> tuple[Point, ...]:
        """The places, in order."""
        return tuple(
            Point(at, (hidden.contiguous().view(torch.uint8).flatten(),))
            for at, hidden in sorted(self.places.items())
        )


def places_of(state: DraftState, spec: PartSpec, device: torch.device) -> dict[int, torch.Tensor]:
    """What `Followed.points` gave. Raises StateError."""
    places: dict[int, torch.Tensor] = {}
    last = 0
    for point in state.points:
        if not last < point.position <= state.length or len(point.parts) != 1:
            raise StateError(f"the draft's point state at {point.position:,} is not what a draft has")
        last, stored = point.position, point.parts[0]
        if stored.dtype != torch.uint8 or tuple(stored.shape) != (spec.row_nbytes,):
            raise StateError(f"part {spec.name}: {stored.dtype} {tuple(stored.shape)} at one position")
        # Where bytes lie in a file is not where float32 values may.
        row = torch.empty(spec.shape, dtype=torch.float32, device=device)
        row.view(-1).view(torch.uint8).copy_(stored)
        places[last] = row
    if not 0 < last == state.length:
        raise StateError(f"the draft of {state.length:,} tokens has no hidden states at their end")
    return places
