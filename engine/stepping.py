"""One batch for many sequences: tokens in, guesses verified, tokens sampled."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch

from engine.admission import check_ids, check_room
from engine.chooser import Mask
from engine.core import Core
from engine.edits import go_back, make_room
from engine.errors import EngineError
from engine.passes import compute
from engine.sampler import sample
from engine.speculative.accept import accept
from engine.speculative.speculation import Step
from engine.state import NextLogits, Pending, SeqId

Tokens = Mapping[SeqId, Sequence[int]]


def advance(core: Core, work: Tokens, guesses: Tokens) -> dict[SeqId, Step]:
    """See `Engine.advance`."""
    for seq, tokens in work.items():
        check_ids(tokens, core.model.vocab_size)
        check_room(core.config, core.memory.refuse_shift(), core.length(seq), len(tokens))
    for seq, tokens in work.items():
        make_room(core, seq, len(tokens))
    guessed = {seq: tuple(ids) for seq, ids in guesses.items() if ids and work.get(seq)}
    batch = {
        seq: (core.length(seq), (*tokens, *guessed.get(seq, ()))) for seq, tokens in work.items() if tokens
    }
    if not batch:
        return {}
    for seq, ids in guessed.items():
        _prepare(core, seq, len(ids))
    found = compute(core.model, core.memory, core.slots, batch, guessed, core.trunk)
    steps = {}
    for seq, (start, _) in batch.items():
        record, logits = core.record(seq), found.logits[seq]
        due = core.has_points and core.until_checkpoint(seq) <= len(work[seq])
        record.append(work[seq])
        if seq in guessed:
            steps[seq] = _settle(core, seq, guessed[seq], logits[-1 - len(guessed[seq]) :])
        else:
            record.follow(logits[-1])
        if core.drafter is not None:
            fed = record.tokens[start:]
            hidden = found.hidden[seq][: len(fed)] if seq in found.hidden else None
            core.drafter.observe(seq, start, fed, hidden)
        if due:
            core.memory.mark(seq)
    return steps


def propose(core: Core, seq: SeqId, at_most: int | None) -> tuple[int, ...]:
    """See `Engine.propose`."""
    record, speculation, config = core.record(seq), core.speculation, core.config
    if speculation is None or not isinstance(record.edge, Pending):
        return ()
    tokens = (*record.tokens, record.edge.token)
    room = min(config.n_ctx - len(tokens), config.max_ubatch - 1)
    count = min(speculation.most, room if at_most is None else min(room, at_most - 1))
    if count < 1:
        return ()
    guesses = speculation.drafter.propose(seq, tokens, record.sampler, count)
    vocab = core.model.vocab_size
    return tuple(itertools.takewhile(lambda token: 0 <= token < vocab, guesses[:count]))


def choose(core: Core, seq: SeqId, allowed: Mask | None = None) -> int:
    """See `Engine.choose`."""
    record = core.record(seq)
    match record.edge:
        case None:
            raise EngineError(f"sequence {seq} is empty: there is nothing to go on from")
        case Pending(token):
            return token
        case NextLogits(logits):
            # Some models have more rows of output than their tokenizer has tokens.
            known = logits[: core.tokenizer.vocab_size]
            token = sample(known, record.sampler, record.tokens, len(record.tokens), allowed)
            record.edge = Pending(token)
            return token


def _prepare(core: Core, seq: SeqId, count: int) -> None:
    """Before `count` guesses are fed: point state that could not be rolled back by as many is kept."""
    if core.has_points and core.length(seq) and core.config.rollback < count:
        core.memory.mark(seq)


def _settle(core: Core, seq: SeqId, guesses: tuple[int, ...], logits: torch.Tensor) -> Step:
    """Guesses were fed behind the record's tokens: keep those that the target samples too. `logits` [1 +
    guesses, vocab] are before the first of them and after each."""
    record, vocab = core.record(seq), core.tokenizer.vocab_size
    try:
        tokens = accept(logits[:, :vocab], guesses, record.sampler, record.tokens, core.tokenizer.end_ids)
    except EngineError:  # the logits are no numbers: none is chosen here, and `choose` will say it
        tokens = ()
    accepted = max(0, len(tokens) - 1)
    keep = len(record.tokens) + accepted
    record.append(guesses)
    replayed = go_back(core, seq, keep)
    if not replayed:
        record.follow(logits[accepted])
    if tokens:
        record.edge = Pending(tokens[-1])
    step = Step(tokens, len(guesses), accepted, replayed)
    if core.speculation is not None:
        core.speculation.figures.add(step)
    return step
