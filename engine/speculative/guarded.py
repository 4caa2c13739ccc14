"""A drafter that may fail: what it raises ends its drafting, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from engine.errors import StateError, TenutoError
from engine.speculative.base import Drafter
from engine.state import DraftState, Fingerprint, SamplerParams, SeqId

Result = TypeVar("Result")


class Guarded:
    """See `Drafter`: `inner`, up to its first `failure`. From then on it is asked for nothing, and knows
    nothing."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.failure: Exception | None = None

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def wants_hidden(self) -> bool:
        return self.inner.wants_hidden

    @property
    def fingerprint(self) -> Fingerprint | None:
        return self.inner.fingerprint

    def observe(self, seq: SeqId, start: int, tokens: Sequence[int], hidden: torch.Tensor | None) -> None:
        self._ask(lambda: self.inner.observe(seq, start, tokens, hidden), None)

    def propose(self, seq: SeqId, tokens: Sequence[int], sampler: SamplerParams, count: int) -> Sequence[int]:
        return self._ask(lambda: self.inner.propose(seq, tokens, sampler, count), ())

    def cut(self, seq: SeqId, length: int) -> None:
        self._ask(lambda: self.inner.cut(seq, length), None)

    def copy(self, source: SeqId, target: SeqId, length: int) -> None:
        self._ask(lambda: self.inner.copy(source, target, length), None)

    def snapshot(self, seq: SeqId, tokens: Sequence[int], since: int = 0) -> DraftState | None:
        return self._ask(lambda: self.inner.snapshot(seq, tokens, since), None)

    def restore(self, seq: SeqId, tokens: Sequence[int], state: DraftState) -> None:
        """A state that is refused is no failure."""
        if self.failure is None:
            try:
                self.inner.restore(seq, tokens, state)
                return
            except TenutoError:
                raise
            except Exception as error:
                self.failure = error
        raise StateError(f"{self.name} failed: {self.failure}") from self.failure

    def _ask(self, verb: Callable[[], Result], nothing: Result) -> Result:
        if self.failure is None:
            try:
                return verb()
            except Exception as error:
                self.failure = error
        return nothing
