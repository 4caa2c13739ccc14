"""Guesses from the session's own tokens: what followed the last time that the same few tokens were said.

Prompt lookup (Saxena 2023): it needs no model, and is right where text is repeated, as in editing code.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.batch import Ints
from engine.state import DraftState, Fingerprint, SamplerParams, SeqId

#: Lengths of the runs that are looked for, the longest first: shorter ones are found too often to mean much.
LENGTHS = (5, 4, 3, 2)


class NgramDrafter:
    """See `Drafter`. It keeps nothing."""

    name = "ngram"
    wants_hidden = False
    fingerprint: Fingerprint | None = None

    def observe(self, seq: SeqId, start: int, tokens: Sequence[int], hidden: torch.Tensor | None) -> None:
        """Nothing: the tokens are given with every question."""

    def propose(self, seq: SeqId, tokens: Sequence[int], sampler: SamplerParams, count: int) -> Sequence[int]:
        ids = np.asarray(tokens, dtype=np.int64)
        for length in LENGTHS:
            start = followed(ids, length)
            if start is not None:
                return repeated(ids, start, count)
        return ()

    def cut(self, seq: SeqId, length: int) -> None:
        """Nothing."""

    def copy(self, source: SeqId, target: SeqId, length: int) -> None:
        """Nothing."""

    def snapshot(self, seq: SeqId, tokens: Sequence[int], since: int = 0) -> DraftState | None:
        return None

    def restore(self, seq: SeqId, tokens: Sequence[int], state: DraftState) -> None:
        """Nothing."""


def followed(ids: Ints, length: int) -> int | None:
    """Where the last earlier occurrence of the last `length` ids ends; None where there is none."""
    if len(ids) <= length:
        return None
    equal = np.ones(len(ids) - length, dtype=np.bool_)
    for back in range(1, length + 1):
        equal &= ids[length - back : len(ids) - back] == ids[-back]
    found = np.flatnonzero(equal)
    return int(found[-1]) + length if len(found) else None


def repeated(ids: Ints, start: int, count: int) -> tuple[int, ...]:
    """`count` ids from `start` on; where `ids` end, what was found goes round."""
    period = len(ids) - start
    return tuple(int(ids[start + index % period]) for index in range(count))
