"""One batch for many sequences: tokens in, guesses verified, tokens sampled."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from engine.admission import check_ids, check_room
from engine.chooser import Mask
from engine.core import Core
from engine.edits import make_room, read_again, take_back
from engine.errors import EngineError, NoSlot
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
    for seq, (_, ids) in batch.items():  # of all, before anything else can go wrong
        record = core.record(seq)
        record.append(ids)
        record.follow(found.logits[seq])
    steps = _settle(core, guessed)
    for seq, (start, _) in batch.items():
        record = core.record(seq)
        if core.drafter is not None and not (seq in steps and steps[seq].replayed):
            fed, hidden = record.tokens[start:], found.hidden.get(seq)
            core.drafter.observe(seq, start, fed, None if hidden is None else hidden[: len(fed)])
        if core.has_points and core.passed_checkpoint(seq, start):
            core.memory.mark(seq)
    return steps


def step(core: Core, seq: SeqId, at_most: int | None) -> tuple[int, ...]:
    """See `Engine.step`."""
    guesses, edge, before = propose(core, seq, at_most), core.record(seq).edge, core.length(seq)
    if guesses and isinstance(edge, Pending):
        try:
            found = advance(core, {seq: (edge.token,)}, {seq: guesses})[seq]
            return found.tokens or (choose(core, seq),)
        except NoSlot:
            if core.length(seq) != before:
                raise
            # there may still be room for one token
    return (decode(core, [seq])[seq],)


def decode(core: Core, seqs: Sequence[SeqId]) -> dict[SeqId, int]:
    """See `Engine.decode`."""
    edges = {seq: core.record(seq).edge for seq in seqs}
    for seq, edge in edges.items():
        if edge is None:
            choose(core, seq)  # which says so
    advance(core, {seq: (edge.token,) for seq, edge in edges.items() if isinstance(edge, Pending)}, {})
    return {seq: choose(core, seq) for seq in edges}


def propose(core: Core, seq: SeqId, at_most: int | None) -> tuple[int, ...]:
    """See `Engine.propose`."""
    record, speculation = core.record(seq), core.speculation
    if speculation is None or not isinstance(record.edge, Pending):
        return ()
    tokens = (*record.tokens, record.edge.token)
    room = min(core.config.n_ctx - len(tokens), core.config.max_ubatch - 1, core.stride(seq) - 1)
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


def _settle(core: Core, guessed: Mapping[SeqId, tuple[int, ...]]) -> dict[SeqId, Step]:
    """Guesses were fed: keep those that the target samples too. What can fail, because it has to be read
    again, comes last: such a sequence is then as it was before the batch."""
    sampled, again, steps = {}, {}, {}
    for seq, guesses in guessed.items():
        tokens = sampled[seq] = _sample(core, seq, guesses)
        wrong = len(guesses) - max(0, len(tokens) - 1)
        again[seq] = take_back(core, seq, core.length(seq) - wrong)
        if not again[seq]:
            _follow(core, seq, tokens)
    for seq, guesses in guessed.items():
        tokens = sampled[seq]
        if again[seq]:
            read_again(core, seq, again[seq])
            _follow(core, seq, tokens)
        steps[seq] = Step(tokens, len(guesses), max(0, len(tokens) - 1), len(again[seq]))
        if core.speculation is not None:
            core.speculation.figures.add(steps[seq])
    return steps


def _sample(core: Core, seq: SeqId, guesses: tuple[int, ...]) -> tuple[int, ...]:
    """What the target says where `guesses` were fed: see `accept`. Nothing where logits are no numbers;
    `choose` will say so, if it comes to them."""
    record, tokenizer = core.record(seq), core.tokenizer
    assert record.recent is not None, "they were just computed"
    logits = record.recent[-1 - len(guesses) :, : tokenizer.vocab_size]
    history = record.tokens[: -len(guesses)]
    try:
        return accept(logits, guesses, record.sampler, history, tokenizer.end_ids)
    except EngineError:
        return ()


def _follow(core: Core, seq: SeqId, tokens: tuple[int, ...]) -> None:
    """The last of the sampled `tokens` is pending; where there is none, one is still to be chosen."""
    record = core.record(seq)
    assert record.logits is not None, "they were just computed"
    record.edge = Pending(tokens[-1]) if tokens else NextLogits(record.logits)
