"""Best of n: several replies sampled from one state, and the one kept that the model finds likeliest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.errors import ContextFull, UsageError
from engine.reply import Finish, Piece, Reply
from engine.runner import Engine
from engine.state import NextLogits, Pending, SeqId


@dataclass(frozen=True, slots=True)
class Candidate:
    """A reply as it was sampled with `seed`. `mean_logprob` is that of its tokens, each before anything that
    the sampler does to the model's logits; None for a reply without any."""

    seed: int
    pieces: tuple[Piece, ...]
    mean_logprob: float | None

    @property
    def num_tokens(self) -> int:
        return sum(piece.token is not None for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class BestOf:
    """All replies in the order in which they were sampled, and which of them was kept."""

    candidates: tuple[Candidate, ...]
    chosen: int

    @property
    def best(self) -> Candidate:
        return self.candidates[self.chosen]


def best_of(
    engine: Engine, seq: SeqId, count: int, max_tokens: int | None = None, stop: Sequence[str] = ()
) -> BestOf:
    """Sample `count` replies to what `seq` has, and keep the one of the largest mean log-probability, the
    earliest of equals: the sequence is then, bit for bit, what it would be if that had been the only one,
    its sampler's seed included.

    They are said one after the other, each from the same device state, without drafts. That takes a second
    sequence, but no more cells than the longest reply; a copy that `seq` had ends. After an error it is as it
    was. Raises UsageError where all would be the same, NoSlot, EngineError.
    """
    sampler = engine.sampler(seq)
    if count < 1 or sampler.temperature == 0:
        raise UsageError(
            "the best of several replies: there must be some, and a temperature that makes them differ"
        )
    start = engine.device_snapshot(seq)
    aside: SeqId | None = None
    try:
        engine.rewind(seq, 0)  # the cells are wanted for the replies
        aside = engine.device_restore(start)
        candidates: list[Candidate] = []
        chosen, kept = 0, start
        for index in range(count):
            if index:
                engine.device_restore(start, aside)
            seed = seed_of(sampler.seed, index)
            engine.set_sampler(aside, replace(sampler, seed=seed))
            candidates.append(_say(engine, aside, seed, max_tokens, stop))
            if index == 0 or _score(candidates[index]) > _score(candidates[chosen]):
                chosen, kept = index, engine.device_snapshot(aside)
        engine.rewind(aside, 0)
        engine.device_restore(kept, seq)
    except BaseException:
        if aside is not None:
            engine.rewind(aside, 0)
        engine.device_restore(start, seq)
        raise
    finally:
        if aside is not None:
            engine.close(aside)
        engine.device_free(start)
    return BestOf(tuple(candidates), chosen)


def seed_of(seed: int, index: int) -> int:
    """What the reply at `index` is sampled with: the first one with `seed` itself, as alone; the others with
    numbers that the same generator draws beside those that it draws for positions."""
    if index == 0:
        return seed
    return int(np.random.Philox(key=seed, counter=[0, 0, index, 0]).random_raw())


def _say(engine: Engine, seq: SeqId, seed: int, max_tokens: int | None, stop: Sequence[str]) -> Candidate:
    """One reply, as `Engine.generate` says it, with the log-probabilities of its tokens."""
    reply = Reply(engine.tokenizer, tuple(stop), max_tokens)
    pieces: list[Piece] = []
    logprobs: list[float] = []
    ended: Finish | None
    while (ended := reply.ended) is None:
        try:
            token, logprob = _step(engine, seq)
        except ContextFull:
            ended = "context"
            break
        pieces.append(reply.push(token))
        logprobs.append(logprob)
    if reply.unsaid(ended):
        pieces.append(reply.end(ended))
    return Candidate(seed, tuple(pieces), math.fsum(logprobs) / len(logprobs) if logprobs else None)


def _step(engine: Engine, seq: SeqId) -> tuple[int, float]:
    """The next token, left pending, and its log-probability."""
    edge = engine.edge(seq)
    if isinstance(edge, Pending):
        engine.advance({seq: (edge.token,)})
        edge = engine.edge(seq)
    token = engine.choose(seq)
    assert isinstance(edge, NextLogits), "an empty sequence has nothing to choose from"
    known = edge.logits[: engine.tokenizer.vocab_size].double()
    return token, float(torch.log_softmax(known, 0)[token])


def _score(candidate: Candidate) -> float:
    return -math.inf if candidate.mean_logprob is None else candidate.mean_logprob
