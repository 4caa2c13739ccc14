"""Guesses of a second, smaller model that has read the same tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.errors import ConfigError, EngineError, FingerprintMismatch, NoSlot
from engine.runner import Engine
from engine.state import (
    DraftState,
    Fingerprint,
    Pending,
    Provenance,
    SamplerParams,
    SeqId,
    SequenceState,
    Span,
)


class ModelDrafter:
    """See `Drafter`. What the model has read is compared with the tokens at every question, and cut or
    read on from there: it needs to be told of nothing.

    It draws with the target's sampler: of two models that agree, the same numbers choose the same tokens.
    """

    wants_hidden = False

    def __init__(self, engine: Engine, target: Engine) -> None:
        """`engine` is the drafter's own. Raises ConfigError for a model whose tokens are others than the
        target's."""
        if engine.tokenizer.digest != target.tokenizer.digest:
            raise ConfigError(
                f"{engine.model_name} cannot draft for {target.model_name}: its tokenizer is another"
            )
        self._engine = engine
        self._seqs: dict[SeqId, SeqId] = {}
        self.name = engine.model_name

    @property
    def fingerprint(self) -> Fingerprint | None:
        return self._engine.fingerprint

    def observe(self, seq: SeqId, start: int, tokens: Sequence[int], hidden: torch.Tensor | None) -> None:
        """Nothing: the tokens are given with every question."""

    def propose(self, seq: SeqId, tokens: Sequence[int], sampler: SamplerParams, count: int) -> Sequence[int]:
        engine = self._engine
        count = min(count, engine.n_ctx - len(tokens))
        if count < 1:
            return ()
        mine = self._own(seq)
        engine.set_sampler(mine, sampler)
        guesses: list[int] = []
        try:
            self._follow(mine, tokens)
            while len(guesses) < count:
                guesses.append(engine.decode([mine])[mine])
                if guesses[-1] in engine.tokenizer.end_ids:
                    break
        except NoSlot:
            self._forget_others(seq)
        except EngineError:  # the logits are no numbers, or a token is none of this model's
            pass
        return guesses

    def cut(self, seq: SeqId, length: int) -> None:
        """Nothing: it is noticed at the next question."""

    def copy(self, source: SeqId, target: SeqId, length: int) -> None:
        """Nothing: the engine that reads the same tokens for another sequence shares their rows."""

    def snapshot(self, seq: SeqId, tokens: Sequence[int], since: int = 0) -> DraftState | None:
        if seq not in self._seqs:
            return None
        mine = self._seqs[seq]
        length = self._back_to(mine, tokens)
        if not length:
            return None
        state = self._engine.snapshot(mine, min(since, length))
        return DraftState(state.fingerprint, state.layout, length, state.rows, state.points)

    def restore(self, seq: SeqId, tokens: Sequence[int], state: DraftState) -> None:
        engine = self._engine
        for field, theirs, own in state.fingerprint.differing(engine.fingerprint):
            raise FingerprintMismatch(
                f"the draft was made with {field} = {theirs}, this drafter has {own}", field=field
            )
        if seq in self._seqs:
            self._forget(seq)
        ids = tuple(tokens[: state.length])
        whole = SequenceState(
            layout=state.layout,
            fingerprint=state.fingerprint,
            tokens=ids,
            rows=state.rows,
            points=state.points,
            spans=(Span(0, len(ids), Provenance.COMPUTED),) if ids else (),
            edge=Pending(ids[-1]) if ids else None,  # what follows is told with the next question
            sampler=SamplerParams(),
        )
        try:
            self._seqs[seq] = engine.restore(whole)
        except NoSlot:
            self._forget_others(seq)
            self._seqs[seq] = engine.restore(whole)

    # -- its own sequences -------------------------------------------------------------------------

    def _own(self, seq: SeqId) -> SeqId:
        if seq not in self._seqs:
            try:
                self._seqs[seq] = self._engine.create()
            except NoSlot:  # the target has a spare sequence, or sequences that it has closed
                self._forget_others(seq)
                self._seqs[seq] = self._engine.create()
        return self._seqs[seq]

    def _follow(self, mine: SeqId, tokens: Sequence[int]) -> None:
        """Read what is new of `tokens`, all but the last, which is pending then."""
        fed = tokens[:-1]
        length = self._back_to(mine, fed)
        if length < len(fed):
            self._engine.feed(mine, fed[length:])
        self._engine.mark(mine)  # a recurrent one comes back to here, when guesses were wrong
        self._engine.set_pending(mine, tokens[-1])

    def _back_to(self, mine: SeqId, tokens: Sequence[int]) -> int:
        """Cut to what it has in common with `tokens`, as far as it can go on from there. The length."""
        engine = self._engine
        known = engine.tokens(mine)
        count = min(len(known), len(tokens))
        differ = np.flatnonzero(np.asarray(known[:count]) != np.asarray(tokens[:count]))
        length = engine.last_resumable(mine, int(differ[0]) if len(differ) else count)
        engine.rewind(mine, length)
        return length

    def _forget_others(self, seq: SeqId) -> None:
        """The room of a target's many sequences is more than this engine may have."""
        for other in [other for other in self._seqs if other != seq]:
            self._forget(other)

    def _forget(self, seq: SeqId) -> None:
        mine = self._seqs.pop(seq)
        self._engine.rewind(mine, 0)
        self._engine.close(mine)
