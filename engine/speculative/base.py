"""What guesses the next tokens: the interface of a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.state import DraftState, Fingerprint, SamplerParams, SeqId


class Drafter(Protocol):
    """Guesses, cheaply, what a target would say next; every guess is verified by the target.

    Sequences are the target's. A drafter that has lost what it knew of one, or never had it, guesses worse or
    not at all: nothing that is said depends on it.
    """

    @property
    def name(self) -> str:
        """For people."""
        ...

    @property
    def wants_hidden(self) -> bool:
        """Whether `observe` needs the target's hidden states."""
        ...

    @property
    def fingerprint(self) -> Fingerprint | None:
        """What its states are made with; None where it keeps none."""
        ...

    def observe(self, seq: SeqId, start: int, tokens: Sequence[int], hidden: torch.Tensor | None) -> None:
        """The target has committed rows of `tokens`, the first at position `start`. `hidden` float32 [tokens,
        width] is what it computes logits from, where that is wanted."""
        ...

    def propose(self, seq: SeqId, tokens: Sequence[int], sampler: SamplerParams, count: int) -> Sequence[int]:
        """At most `count` guesses at what follows `tokens`: all ids of the sequence, the pending one last."""
        ...

    def cut(self, seq: SeqId, length: int) -> None:
        """Only the first `length` tokens are left."""
        ...

    def copy(self, source: SeqId, target: SeqId, length: int) -> None:
        """`target` has the first `length` tokens of `source`, and nothing else."""
        ...

    def snapshot(self, seq: SeqId, tokens: Sequence[int], since: int = 0) -> DraftState | None:
        """What it knows of the sequence's fed `tokens`, rows from `since` on: the `length` of it may be
        less than there are tokens, and less than `since`. None where it knows nothing."""
        ...

    def restore(self, seq: SeqId, tokens: Sequence[int], state: DraftState) -> None:
        """Know again what `snapshot` gave, of an empty sequence. All or nothing.
        Raises FingerprintMismatch, StateError, NoSlot."""
        ...
