"""Fork, rewind and shift: done as said, or refused with nothing changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.errors import ContextFull, EditRefused, NoSlot
from engine.runner import Engine
from engine.state import NextLogits, Pending, Provenance, SamplerParams, Span
from tests.engine.conftest import MakeEngine
from tests.engine.pictures import begun, picture, said

PAST = [(7 * i) % 250 for i in range(120)]


def test_a_fork_goes_on_as_its_source_does(engine: Engine) -> None:
    seq = begun(engine, PAST, steps=3)
    engine.set_sampler(seq, SamplerParams(temperature=1.2, seed=3))
    fork = engine.fork(seq)
    assert picture(engine, fork) == picture(engine, seq)
    assert said(engine, fork, 15) == said(engine, seq, 15)


def test_a_fork_is_its_own(engine: Engine) -> None:
    seq = begun(engine, PAST)
    before, fork = picture(engine, seq), engine.fork(seq)
    engine.feed(fork, range(40))
    engine.rewind(fork, 30)
    engine.shift(fork, 5, 10)
    engine.set_sampler(fork, SamplerParams(seed=9))
    engine.feed(fork, range(40))
    assert picture(engine, seq) == before
    engine.close(fork)
    assert picture(engine, seq) == before


def test_a_fork_without_a_slot_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(num_seqs=1)
    seq = begun(engine, PAST)
    with pytest.raises(NoSlot):
        engine.fork(seq)
    assert engine.length(seq) == 120


def test_a_fork_copies_nothing(engine: Engine) -> None:
    seq = begun(engine, PAST)
    free = engine._memory.free_cells()
    engine.fork(seq)
    assert engine._memory.free_cells() == free


@pytest.mark.parametrize("length", [1, 60, 119])
def test_after_a_rewind_what_followed_is_pending_and_is_said_again(
    length: int, make_engine: MakeEngine
) -> None:
    engine = make_engine()
    seq = begun(engine, PAST)
    engine.rewind(seq, length)
    assert engine.tokens(seq) == tuple(PAST[:length])
    assert engine.edge(seq) == Pending(PAST[length])
    assert engine.logits(seq) is None
    engine.feed(seq, PAST[length:])
    alone = make_engine()
    whole = begun(alone, PAST[:length])
    alone.feed(whole, PAST[length:])
    torch.testing.assert_close(engine.logits(seq), alone.logits(whole), atol=1e-4, rtol=0)
    assert said(engine, seq, 10) == said(alone, whole, 10)


def test_a_rewind_to_nothing_is_a_fresh_sequence(engine: Engine) -> None:
    seq = begun(engine, PAST)
    engine.rewind(seq, 0)
    assert (engine.tokens(seq), engine.edge(seq), engine.spans(seq)) == ((), None, ())
    assert engine.feed(seq, PAST).shared == 0


def test_a_rewind_to_where_one_is_changes_nothing(engine: Engine) -> None:
    seq = begun(engine, PAST)
    before = picture(engine, seq)
    engine.rewind(seq, 120)
    assert picture(engine, seq) == before


@pytest.mark.parametrize("length", [-1, 121])
def test_a_rewind_beyond_the_sequence_is_refused(length: int, engine: Engine) -> None:
    seq = begun(engine, PAST)
    before = picture(engine, seq)
    with pytest.raises(EditRefused, match="no state"):
        engine.rewind(seq, length)
    assert picture(engine, seq) == before


def test_a_window_says_truly_how_far_back_it_goes(make_engine: MakeEngine, windowed_path: Path) -> None:
    sizes = {"n_ctx": 2048, "num_cells": 4096, "num_seqs": 1, "max_batch": 64, "max_ubatch": 64}
    engine, alone = make_engine(windowed_path, **sizes), make_engine(windowed_path, **sizes)
    ids = [i % 250 for i in range(1500)]
    seq = begun(engine, ids)
    answers = {length: engine.can_resume_at(seq, length) for length in (0, 1, 100, 1000, 1400, 1499, 1500)}
    assert answers[0]
    assert answers[1500]
    assert not answers[100]
    for length, possible in sorted(answers.items(), reverse=True):
        if length and not possible:
            before = picture(engine, seq)
            with pytest.raises(EditRefused):
                engine.rewind(seq, length)
            assert picture(engine, seq) == before
    assert answers[1499]
    engine.rewind(seq, 1499)
    engine.feed(seq, [ids[1499]])
    whole = begun(alone, ids[:1499])
    alone.feed(whole, [ids[1499]])
    assert said(engine, seq, 5) == said(alone, whole, 5)
    assert not engine.can_resume_at(seq, 1600)


def test_full_windows_can_be_rewound_anywhere(make_engine: MakeEngine, windowed_path: Path) -> None:
    engine = make_engine(windowed_path, full_windows=True)
    seq = begun(engine, [i % 250 for i in range(400)])
    assert all(engine.can_resume_at(seq, length) for length in range(401))
    engine.rewind(seq, 17)
    assert engine.length(seq) == 17


@pytest.mark.parametrize(
    ("n_keep", "n_discard", "gone"),
    [
        (0, 0, 60),  # 0 is half of what is left
        (20, 0, 50),
        (20, 30, 30),
        (20, 99, 99),
        (20, 100, 99),  # one token stays
        (0, 10_000, 119),
        (119, 5, 0),
        (120, 0, 0),
        (500, 7, 0),  # more is kept than there is
        (118, 0, 1),
    ],
)
def test_a_shift_discards_what_is_asked_within_reason(
    n_keep: int, n_discard: int, gone: int, engine: Engine
) -> None:
    seq = begun(engine, PAST, steps=1)
    edge = engine.edge(seq)
    assert engine.shift(seq, n_keep, n_discard) == gone
    assert engine.tokens(seq) == (*PAST[:n_keep], *PAST[n_keep + gone :])
    assert engine.edge(seq) == edge
    if gone:
        kept = () if n_keep == 0 else (Span(0, n_keep, Provenance.COMPUTED),)
        assert engine.spans(seq) == (*kept, Span(n_keep, 120 - gone, Provenance.SHIFTED))
    said(engine, seq, 5)


def test_negative_numbers_never_underflow_a_shift(engine: Engine) -> None:
    seq = begun(engine, PAST)
    before = picture(engine, seq)
    for n_keep, n_discard in ((-1, 0), (0, -5), (-200, -200)):
        with pytest.raises(EditRefused, match="negative"):
            engine.shift(seq, n_keep, n_discard)
    assert picture(engine, seq) == before


def test_an_empty_sequence_has_nothing_to_shift(engine: Engine) -> None:
    assert engine.shift(engine.create(), 0) == 0


def test_logits_of_before_a_shift_are_no_canary(engine: Engine) -> None:
    seq = begun(engine, PAST)
    engine.shift(seq, 4)
    state = engine.snapshot(seq)
    assert isinstance(state.edge, NextLogits)
    assert state.canary is None
    again = engine.restore(state)
    assert engine.snapshot(again).canary is None
    engine.feed(again, [1])
    assert engine.snapshot(again).canary is not None


def test_a_short_window_refuses_to_shift_and_says_why(make_engine: MakeEngine, windowed_path: Path) -> None:
    engine = make_engine(windowed_path, n_ctx=64, overflow="shift")
    seq = begun(engine, range(64))
    before = picture(engine, seq)
    with pytest.raises(EditRefused, match="full_windows"):
        engine.shift(seq, 0)
    with pytest.raises(ContextFull, match="cannot be shifted"):
        engine.feed(seq, [1])
    assert picture(engine, seq) == before


def test_a_shift_that_finds_no_cells_changes_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(num_cells=140, n_ctx=140)
    seq = begun(engine, PAST)
    fork = engine.fork(seq)
    before = picture(engine, seq)
    with pytest.raises(NoSlot):  # shared cells are copied first, and there are not so many
        engine.shift(fork, 10, 20)
    assert picture(engine, seq) == before
    assert picture(engine, fork) == before


@pytest.mark.parametrize(("n_keep", "n_discard"), [(0, 0), (8, 0), (8, 1), (8, 10_000)])
def test_a_full_context_moves_on_by_choice(n_keep: int, n_discard: int, make_engine: MakeEngine) -> None:
    settings = {"overflow": "shift", "n_keep": n_keep, "n_discard": n_discard}
    engine = make_engine(n_ctx=64, **settings)
    seq = begun(engine, range(60))
    said(engine, seq, 30)
    assert engine.length(seq) <= 64
    assert engine.tokens(seq)[:n_keep] == tuple(range(n_keep))
    engine.feed(seq, range(40))
    assert engine.tokens(seq)[-40:] == tuple(range(40))


def test_a_context_that_is_kept_whole_cannot_move_on(make_engine: MakeEngine) -> None:
    engine = make_engine(n_ctx=64, overflow="shift", n_keep=63)
    seq = begun(engine, range(64), steps=1)
    with pytest.raises(ContextFull):
        engine.decode([seq])
    assert engine.length(seq) == 64


def test_more_than_a_shifted_context_can_hold_is_refused_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine(n_ctx=64, overflow="shift", n_keep=8)
    seq = begun(engine, range(60))
    before = picture(engine, seq)
    with pytest.raises(ContextFull):
        engine.feed(seq, [1] * 56)
    assert picture(engine, seq) == before
    engine.feed(seq, [1] * 55)
    assert engine.tokens(seq)[:8] == tuple(range(8))
