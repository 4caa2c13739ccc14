"""Of several replies the likeliest is kept, and nothing tells afterwards that there were others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.best_of import BestOf, best_of, seed_of
from engine.errors import EngineError, HandleRefused, NoSlot, UsageError
from engine.runner import Engine
from engine.state import Pending, SamplerParams, SeqId
from tests.engine.conftest import MakeEngine
from tests.engine.pictures import begun, bits, picture
from tests.exact.members import MEMBERS, open_member

PAST = [(7 * i) % 250 for i in range(60)]
SAMPLER = SamplerParams(temperature=1.5, top_k=40, seed=11)


def asked(engine: Engine, sampler: SamplerParams = SAMPLER) -> SeqId:
    seq = begun(engine, PAST)
    engine.set_sampler(seq, sampler)
    return seq


def alone(engine: Engine, seed: int, most: int) -> tuple[SeqId, list[int], float]:
    """A reply that is the only one: its sequence, its tokens, and their mean log-probability."""
    seq = asked(engine, dataclasses.replace(SAMPLER, seed=seed))
    tokens, logprobs = [], []
    for _ in range(most):
        token = engine.decode([seq])[seq]
        logits = engine.logits(seq)
        assert logits is not None
        logprobs.append(float(logits[: engine.tokenizer.vocab_size].double().log_softmax(0)[token]))
        tokens.append(token)
        if token in engine.tokenizer.end_ids:
            break
    return seq, tokens, sum(logprobs) / len(logprobs)


def tokens_of(found: BestOf, index: int) -> list[int]:
    pieces = found.candidates[index].pieces
    return [piece.token for piece in pieces if piece.token is not None]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_likeliest_reply_is_kept_as_if_it_had_been_the_only_one(
    count: int, make_engine: MakeEngine
) -> None:
    engine, twin = make_engine(), make_engine()
    seq = asked(engine)
    found = best_of(engine, seq, count, max_tokens=12)
    means = []
    for index, candidate in enumerate(found.candidates):
        single, tokens, mean = alone(twin, candidate.seed, 12)
        assert tokens_of(found, index) == tokens
        assert candidate.mean_logprob == pytest.approx(mean, abs=1e-12)
        means.append(mean)
        twin.rewind(single, 0)
        twin.close(single)
    assert found.chosen == means.index(max(means))
    single, _, _ = alone(twin, found.best.seed, 12)
    assert picture(engine, seq) == picture(twin, single)
    assert engine.logits(seq).equal(twin.logits(single))  # type: ignore[union-attr, arg-type]
    assert bits(engine, seq, 10) == bits(twin, single, 10)


@pytest.mark.parametrize("family", MEMBERS)
def test_every_member_keeps_its_best(family: str) -> None:
    engine, twin = open_member(family, "q8_0"), open_member(family, "q8_0")
    seq = asked(engine)
    found = best_of(engine, seq, 3, max_tokens=6)
    single, tokens, _ = alone(twin, found.best.seed, 6)
    assert tokens_of(found, found.chosen) == tokens
    assert engine.tokens(seq) == twin.tokens(single)
    assert bits(engine, seq, 10) == bits(twin, single, 10)


def test_the_first_is_sampled_as_alone_and_seeds_are_their_own() -> None:
    seeds = [seed_of(11, index) for index in range(100)]
    assert seeds[0] == 11
    assert len(set(seeds)) == 100
    assert seeds == [seed_of(11, index) for index in range(100)]
    assert set(seeds[1:]).isdisjoint(seed_of(12, index) for index in range(1, 100))
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert seeds[1:3] == [9157565308447178939, 4673266468435450227], "they stay the same in every release"


def test_equally_likely_replies_leave_the_first(engine: Engine) -> None:
    only = tuple((token, float("-inf")) for token in range(260) if token != 65)
    seq = asked(engine, dataclasses.replace(SAMPLER, logit_bias=only))
    found = best_of(engine, seq, 3, max_tokens=4)
    assert tokens_of(found, 2) == [65] * 4
    assert found.chosen == 0
    assert engine.sampler(seq).seed == SAMPLER.seed


def test_a_pending_token_comes_first(make_engine: MakeEngine) -> None:
    engine, twin = make_engine(), make_engine()
    for each in (engine, twin):
        each.set_pending(asked(each), 42)
    found = best_of(engine, SeqId(0), 1, max_tokens=6)
    assert engine.tokens(SeqId(0))[60] == 42
    pieces = [piece.token for piece in twin.generate(SeqId(0), 6)]
    assert tokens_of(found, 0) == pieces


def test_stops_and_a_full_context_end_replies_as_ever(make_engine: MakeEngine) -> None:
    engine = make_engine(n_ctx=64)
    seq = asked(engine)
    found = best_of(engine, seq, 2)
    assert {candidate.pieces[-1].finish for candidate in found.candidates} <= {"context", "eos"}
    engine.rewind(seq, 60)
    stop = "".join(piece.text for piece in found.candidates[0].pieces)[:1]
    again = best_of(engine, seq, 1, stop=(stop,))
    assert again.best.pieces[-1].finish in {"stop", "eos"}
    full = make_engine(n_ctx=60)
    nothing = best_of(full, said_full(full), 2)
    assert [candidate.mean_logprob for candidate in nothing.candidates] == [None, None]
    assert (nothing.chosen, nothing.best.num_tokens) == (0, 0)


def said_full(engine: Engine) -> SeqId:
    """A sequence that fills its context, with a token pending."""
    seq = asked(engine)
    engine.set_pending(seq, 5)
    return seq


@pytest.mark.parametrize("count", [0, -1])
def test_none_or_the_same_ones_are_not_to_be_chosen_from(count: int, engine: Engine) -> None:
    seq = asked(engine)
    with pytest.raises(UsageError):
        best_of(engine, seq, count)
    engine.set_sampler(seq, SamplerParams())
    with pytest.raises(UsageError):
        best_of(engine, seq, 3)


def test_replies_take_the_cells_of_one(make_engine: MakeEngine) -> None:
    engine = make_engine(n_ctx=80, num_cells=80)
    seq = asked(engine)
    assert len(tokens_of(best_of(engine, seq, 4, max_tokens=15), 0)) == 15
    assert engine._device_states.nbytes() == 0
    assert list(engine._slots._live) == [seq]


def no_slot(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> type[BaseException]:
    while True:
        try:
            engine.create()
        except NoSlot:
            return NoSlot


def no_room(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> type[BaseException]:
    engine._device_states._budget = sum(spec.row_nbytes for spec in engine.layout) * 61
    return NoSlot


def broken_off(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> type[BaseException]:
    calls = iter(range(100))
    forward = engine._model.forward

    def breaking(*args: torch.Tensor) -> torch.Tensor:
        if next(calls) == 13:
            raise KeyboardInterrupt
        return forward(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(engine._model, "forward", breaking)
    return KeyboardInterrupt


def no_numbers(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> type[BaseException]:
    forward = engine._model.forward
    monkeypatch.setattr(engine._model, "forward", lambda *args: forward(*args) * float("nan"))
    return EngineError


@pytest.mark.parametrize("trouble", [no_slot, no_room, broken_off, no_numbers])
def test_after_an_error_the_sequence_is_as_it_was(
    trouble: Callable[[Engine, pytest.MonkeyPatch], type[BaseException]],
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tight = {"n_ctx": 80, "num_cells": 80}  # no room for two
    engine, twin = make_engine(**tight), make_engine(**tight)
    seq, same = asked(engine), asked(twin)
    before = picture(engine, seq)
    with monkeypatch.context() as patched:
        error = trouble(engine, patched)
        live = list(engine._slots._live)
        with pytest.raises(error):
            best_of(engine, seq, 4, max_tokens=5)
    assert picture(engine, seq) == before
    assert (list(engine._slots._live), engine._device_states.nbytes()) == (live, 0)
    assert bits(engine, seq, 5) == bits(twin, same, 5)


def test_an_empty_sequence_has_nothing_to_reply_to(engine: Engine) -> None:
    seq = engine.create(SAMPLER)
    with pytest.raises(EngineError, match="empty"):
        best_of(engine, seq, 2)
    assert engine.tokens(seq) == ()


def test_a_copy_that_the_sequence_had_ends(engine: Engine) -> None:
    seq = asked(engine)
    handle = engine.device_snapshot(seq)
    best_of(engine, seq, 2, max_tokens=3)
    with pytest.raises(HandleRefused) as refused:
        engine.device_restore(handle)
    assert refused.value.details["reason"] == "stale"
    assert isinstance(engine.edge(seq), Pending)


def test_windows_that_drop_rows_while_replies_are_said_change_nothing(
    make_engine: MakeEngine, windowed_path: Path
) -> None:
    settings = {"path": windowed_path, "num_seqs": 2, "max_batch": 16, "max_ubatch": 16}
    engine, twin = make_engine(**settings), make_engine(**settings)
    found = best_of(engine, asked(engine), 3, max_tokens=60)
    single, tokens, _ = alone(twin, found.best.seed, 60)
    assert tokens_of(found, found.chosen) == tokens
    assert bits(engine, SeqId(0), 5) == bits(twin, single, 5)
