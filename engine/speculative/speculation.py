"""A drafter at work: how many guesses are asked for, and what came of them."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ConfigError
from engine.speculative.base import Drafter
from engine.speculative.guarded import Guarded


@dataclass(frozen=True, slots=True)
class Step:
    """What one batch gave a sequence: the `tokens` that were sampled, the last of them pending; how many
    guesses were `drafted` and `accepted`; and how many tokens had to be `replayed` from a checkpoint, because
    point state could not be rolled back."""

    tokens: tuple[int, ...]
    drafted: int = 0
    accepted: int = 0
    replayed: int = 0


@dataclass(slots=True)
class Figures:
    """Sums over all steps since the engine began."""

    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    replayed: int = 0

    def add(self, step: Step) -> None:
        self.steps += 1
        self.tokens += len(step.tokens)
        self.drafted += step.drafted
        self.accepted += step.accepted
        self.replayed += step.replayed

    @property
    def tokens_per_step(self) -> float:
        """Of the steps in which something was guessed; 1 is what there is without guesses."""
        return self.tokens / self.steps if self.steps else 1.0


class Speculation:
    """`most` guesses at a time are asked of `drafter`, until it fails."""

    def __init__(self, drafter: Drafter, most: int) -> None:
        if most < 1:
            raise ConfigError(f"draft_max = {most}: it must be at least 1")
        self.drafter = Guarded(drafter)
        self.most = most
        self.figures = Figures()
