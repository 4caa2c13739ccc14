"""Drafters that guess what a test tells them to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from engine.state import DraftState, Fingerprint, SamplerParams, SeqId


class Wrong(BaseException):
    """What a drafter was told is not true. No exception: an engine goes on after those."""


def must(condition: bool) -> None:
    if not condition:
        raise Wrong


#: (all ids so far, how many guesses at most) -> the guesses
Guess = Callable[[Sequence[int], int], Sequence[int]]


@dataclass
class Told:
    """See `Drafter`: guesses by `guess`, and remembers what it was told."""

    guess: Guess
    name: str = "told"
    wants_hidden: bool = False
    fingerprint: Fingerprint | None = None
    seen: dict[SeqId, list[int]] = field(default_factory=dict)

    def observe(self, seq: SeqId, start: int, tokens: Sequence[int], hidden: torch.Tensor | None) -> None:
        known = self.seen.setdefault(seq, [])
        must(len(known) == start)  # every token is told once, in order
        known.extend(tokens)

    def propose(self, seq: SeqId, tokens: Sequence[int], sampler: SamplerParams, count: int) -> Sequence[int]:
        must(self.seen.get(seq, []) == list(tokens[:-1]))
        return self.guess(tokens, count)

    def cut(self, seq: SeqId, length: int) -> None:
        del self.seen.setdefault(seq, [])[length:]

    def copy(self, source: SeqId, target: SeqId, length: int) -> None:
        self.seen[target] = self.seen.setdefault(source, [])[:length]

    def snapshot(self, seq: SeqId, tokens: Sequence[int], since: int = 0) -> DraftState | None:
        return None

    def restore(self, seq: SeqId, tokens: Sequence[int], state: DraftState) -> None:
        raise Wrong("it keeps nothing")


def continuation(whole: Sequence[int], wrong_at: Callable[[int], bool]) -> Guess:
    """Guesses the next tokens of `whole`, another one at the positions that are `wrong_at`."""

    def guess(tokens: Sequence[int], count: int) -> Sequence[int]:
        must(list(tokens) == list(whole[: len(tokens)]))
        right = enumerate(whole[len(tokens) : len(tokens) + count], start=len(tokens))
        return [(token + 1) % 250 if wrong_at(position) else token for position, token in right]

    return guess
