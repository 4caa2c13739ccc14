"""How the tokens of one reply are chosen where more is wanted than the sampler's choice."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.reply import Logprobs
from engine.state import Edge, NextLogits, SeqId
from engine.tokenizer import Tokenizer

#: bool [vocab]: which tokens may be next.
Mask = npt.NDArray[np.bool_]


class Constraint(Protocol):
    """What a reply may be, token by token. Its state is a function of the tokens that it was told alone, so
    that a reply is the same whenever it is said."""

    def allowed(self) -> Mask:
        """Which tokens may follow those that it was told."""
        ...

    def push(self, token: int) -> None:
        """The next token of the reply, one that was allowed."""
        ...


class Choosing(Protocol):
    """What is asked of an engine."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    def edge(self, seq: SeqId) -> Edge: ...

    def choose(self, seq: SeqId, allowed: Mask | None = None) -> int: ...


class Chooser:
    """Of one reply. Its tokens are chosen one at a time: a drafter's guesses, which the sampler alone would
    judge, have no place in it."""

    def __init__(self, logprobs: int | None = None, constraint: Constraint | None = None) -> None:
        """With each token its log-probability and those of the `logprobs` likeliest in its place, or none."""
        self._logprobs = logprobs
        self._constraint = constraint

    def choose(self, engine: Choosing, seq: SeqId) -> tuple[int, Logprobs | None]:
        """The token that follows, left pending, where logits are the edge. Raises as `Engine.choose`."""
        edge = engine.edge(seq)
        assert isinstance(edge, NextLogits), "a token is chosen once"
        allowed = None if self._constraint is None else self._constraint.allowed()
        token = engine.choose(seq, allowed)
        if self._constraint is not None:
            self._constraint.push(token)
        if self._logprobs is None:
            return token, None
        return token, logprobs(edge.logits[: engine.tokenizer.vocab_size], token, self._logprobs)


def logprobs(logits: torch.Tensor, token: int, count: int) -> Logprobs:
    """Of float32 [vocab] `logits`; equally likely tokens are told lowest id first."""
    scores = logits.numpy(force=True).astype(np.float64)
    scores -= scores.max()
    scores -= np.log(np.exp(scores).sum())
    best = np.argsort(-scores, kind="stable")[:count]
    return Logprobs(float(scores[token]), tuple((int(each), float(scores[each])) for each in best))
