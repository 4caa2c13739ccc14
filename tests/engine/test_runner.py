"""Tokens in and tokens out: whatever goes wrong on the way, sequences are what they were or what was read."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import BatchRefused, ContextFull, EngineError, NoSlot
from engine.reading import FeedResult
from engine.runner import Engine
from engine.state import NextLogits, Pending, SamplerParams
from tests.engine.conftest import MakeEngine
from tests.engine.pictures import begun, bits, picture, said

TEXT = "the quick brown fox jumps over the lazy dog and goes on to the next of them"


class Broken(Exception):
    """What a failing model raises here."""


def break_after(engine: Engine, monkeypatch: pytest.MonkeyPatch, passes: int) -> None:
    """Let the model fail in the middle of a pass, after `passes` whole ones."""
    model, done = engine._model, []
    forward = model.forward

    def failing(tokens: torch.Tensor, positions: torch.Tensor, view: Any, outputs: torch.Tensor) -> Any:
        logits = forward(tokens, positions, view, outputs)  # the rows are written by now
        if len(done) == passes:
            raise Broken
        done.append(None)
        return logits

    monkeypatch.setattr(model, "forward", failing)


def test_feeding_in_pieces_is_feeding_at_once(engine: Engine) -> None:
    whole, ids = begun(engine, TEXT), engine.tokenizer.encode(TEXT)
    pieces = engine.create()
    engine.feed(pieces, [9])  # so that no prefix is shared
    engine.rewind(pieces, 0)
    for start in range(0, len(ids), 7):
        engine.feed(pieces, ids[start : start + 7])
    assert engine.tokens(pieces) == engine.tokens(whole) == tuple(ids)
    torch.testing.assert_close(engine.logits(pieces), engine.logits(whole), atol=1e-4, rtol=0)


def test_batches_and_passes_do_not_change_what_is_said(make_engine: MakeEngine) -> None:
    expected = said(engine := make_engine(), begun(engine, TEXT), 20)
    for sizes in ({"max_batch": 16}, {"max_ubatch": 5}, {"max_batch": 13, "max_ubatch": 4}):
        other = make_engine(**sizes)
        assert said(other, begun(other, TEXT), 20) == expected


def test_equal_work_gives_equal_bits_in_two_engines(make_engine: MakeEngine, windowed_path: Path) -> None:
    for settings in ({}, {"dtype": "bf16", "type_k": "q8_0"}, {"path": windowed_path}):
        first, second = make_engine(**settings), make_engine(**settings)
        begun(second, "another sequence, so that rows lie elsewhere")
        assert bits(first, begun(first, TEXT), 40) == bits(second, begun(second, TEXT), 40)


def test_progress_is_told_after_every_batch(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batch=10)
    told: list[tuple[int, int]] = []
    result = engine.feed(engine.create(), range(25), progress=lambda done, total: told.append((done, total)))
    assert told == [(10, 25), (20, 25), (25, 25)]
    assert result == FeedResult(0, 25)


def test_after_a_cancel_what_was_read_stays(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batch=10)
    seq, asked = engine.create(), iter([False, False, True])
    result = engine.feed(seq, range(25), cancel=lambda: next(asked))
    assert result == FeedResult(0, 20)
    assert engine.tokens(seq) == tuple(range(20))
    assert isinstance(engine.edge(seq), NextLogits)
    engine.feed(seq, range(20, 25))
    whole = make_engine(max_batch=10)
    assert said(engine, seq, 5) == said(whole, begun(whole, range(25)), 5)


def test_a_feed_that_is_cancelled_at_once_leaves_nothing(engine: Engine) -> None:
    begun(engine, TEXT)
    seq = engine.create()
    assert engine.feed(seq, engine.tokenizer.encode(TEXT), cancel=lambda: True) == FeedResult(0, 0)
    assert (engine.tokens(seq), engine.edge(seq)) == ((), None)


@pytest.mark.parametrize("passes", [0, 1, 2])
@pytest.mark.parametrize("windowed", [False, True])
def test_an_error_in_the_middle_of_a_pass_leaves_everything_as_it_was(
    windowed: bool,
    passes: int,
    make_engine: MakeEngine,
    tiny_path: Path,
    windowed_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(windowed_path if windowed else tiny_path, max_ubatch=40, num_cells=700, num_seqs=2)
    first, second = begun(engine, TEXT * 2, steps=2), begun(engine, TEXT[:50])
    before = [picture(engine, seq) for seq in (first, second)]
    with monkeypatch.context() as patch:
        break_after(engine, patch, passes)
        with pytest.raises(Broken):
            engine.feed(second, range(100))
    assert [picture(engine, seq) for seq in (first, second)] == before
    rival = make_engine(windowed_path if windowed else tiny_path, max_ubatch=40, num_cells=700, num_seqs=2)
    twin = [begun(rival, TEXT * 2, steps=2), begun(rival, TEXT[:50])]
    assert bits(engine, first, 10) == bits(rival, twin[0], 10)
    assert bits(engine, second, 10) == bits(rival, twin[1], 10)


def test_an_error_while_a_prefix_is_shared_leaves_an_empty_sequence(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = begun(engine, TEXT)
    before, seq = picture(engine, source), engine.create()
    free = engine._memory.free_cells()
    with monkeypatch.context() as patch:
        break_after(engine, patch, 0)
        with pytest.raises(Broken):
            engine.feed(seq, engine.tokenizer.encode(TEXT + " more"))
    assert (engine.tokens(seq), engine.edge(seq), engine.spans(seq)) == ((), None, ())
    assert engine._memory.free_cells() == free
    assert picture(engine, source) == before


def test_an_error_in_a_step_for_several_leaves_them_all(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seqs = [begun(engine, TEXT, steps=1), begun(engine, TEXT[5:], steps=1)]
    before = [picture(engine, seq) for seq in seqs]
    with monkeypatch.context() as patch:
        break_after(engine, patch, 0)
        with pytest.raises(Broken):
            engine.decode(seqs)
    assert [picture(engine, seq) for seq in seqs] == before


def test_sequences_decoded_together_say_what_they_say_alone(make_engine: MakeEngine) -> None:
    texts = [TEXT, TEXT[3:40], "something else", "x"]
    engine, alone = make_engine(), make_engine()
    seqs = [begun(engine, text) for text in texts]
    together = [engine.decode(seqs) for _ in range(20)]
    for seq, text in zip(seqs, texts, strict=True):
        assert [step[seq] for step in together] == said(alone, begun(alone, text), 20)


def test_a_step_feeds_what_is_pending_and_leaves_the_next(engine: Engine) -> None:
    seq = begun(engine, "abc")
    first = engine.decode([seq])[seq]
    assert engine.length(seq) == 3
    assert engine.edge(seq) == Pending(first)
    second = engine.decode([seq, seq])[seq]
    assert engine.tokens(seq) == (*engine.tokenizer.encode("abc"), first)
    assert engine.edge(seq) == Pending(second)


def test_a_pending_token_is_dropped_by_a_feed(engine: Engine) -> None:
    seq = begun(engine, "abc", steps=1)
    engine.feed(seq, [5])
    assert engine.tokens(seq) == (*engine.tokenizer.encode("abc"), 5)
    engine.set_pending(seq, 7)
    engine.decode([seq])
    assert engine.tokens(seq)[-1] == 7


def test_a_sampler_counts_positions_not_calls(make_engine: MakeEngine) -> None:
    params = SamplerParams(temperature=1.5, seed=11)
    engine = make_engine()
    seq = engine.create(params)
    engine.feed(seq, engine.tokenizer.encode(TEXT))
    expected = said(engine, seq, 12)
    assert expected != said(engine, begun(engine, TEXT), 12)
    fork = begun(engine, TEXT, steps=0)
    engine.set_sampler(fork, params)
    assert said(engine, fork, 12) == expected
    engine.rewind(fork, len(TEXT) - 1)  # "th" is one token, twice: some way before the reply
    assert engine.sampler(fork) == params


def test_a_full_context_is_refused_before_any_change(make_engine: MakeEngine) -> None:
    engine = make_engine(n_ctx=64)
    seq = begun(engine, range(60))
    before = picture(engine, seq)
    with pytest.raises(ContextFull, match="5 more do not fit") as refused:
        engine.feed(seq, range(5))
    assert refused.value.details == {"length": 60, "count": 5, "n_ctx": 64}
    assert picture(engine, seq) == before
    engine.feed(seq, range(4))
    engine.decode([seq])
    other = begun(engine, "abc", steps=1)
    before = picture(engine, other)
    with pytest.raises(ContextFull):
        engine.decode([other, seq])
    assert picture(engine, other) == before


def test_a_reply_ends_where_the_context_does(make_engine: MakeEngine) -> None:
    engine = make_engine(n_ctx=64)
    seq = begun(engine, range(60))
    pieces = list(engine.generate(seq))
    assert pieces[-1].finish in ("context", "eos")
    if pieces[-1].finish == "context":
        assert engine.length(seq) == 64
        assert len(pieces) == 6  # five tokens (the last is pending), and the word of the end


def test_a_reply_can_be_left_at_any_time(make_engine: MakeEngine) -> None:
    engine, whole = make_engine(), make_engine()
    expected = said(whole, begun(whole, TEXT), 10)
    seq = begun(engine, TEXT)
    told = []
    for _ in range(5):
        reply = engine.generate(seq)
        told += [next(reply).token, next(reply).token]
        reply.close()  # type: ignore[attr-defined]
    assert told == expected


def test_a_cancelled_reply_says_so_and_goes_on_later(engine: Engine) -> None:
    seq, asked = begun(engine, TEXT), iter([False, False, True])
    pieces = list(engine.generate(seq, cancel=lambda: next(asked)))
    assert [piece.token is None for piece in pieces] == [False, False, True]
    assert pieces[-1].finish == "cancelled"
    assert [piece.finish for piece in engine.generate(seq, max_tokens=2)] == [None, "length"]


def test_ids_outside_of_the_vocabulary_are_refused(engine: Engine) -> None:
    seq = begun(engine, "abc")
    before = picture(engine, seq)
    for ids in ([-1], [3, 260]):
        with pytest.raises(BatchRefused, match="vocabulary"):
            engine.feed(seq, ids)
    with pytest.raises(BatchRefused):
        engine.set_pending(seq, 260)
    assert picture(engine, seq) == before


def test_sequences_are_counted_and_named(engine: Engine) -> None:
    seqs = [engine.create() for _ in range(4)]
    with pytest.raises(NoSlot, match="all 4"):
        engine.create()
    engine.close(seqs[0])
    with pytest.raises(EngineError, match="no live sequence"):
        engine.length(seqs[0])
    assert engine.length(engine.create()) == 0


def test_an_empty_sequence_has_nothing_to_say(engine: Engine) -> None:
    seq = engine.create()
    assert engine.feed(seq, []) == FeedResult(0, 0)
    with pytest.raises(EngineError, match="empty"):
        engine.decode([seq])
    engine.set_pending(seq, 5)
    engine.decode([seq])
    assert engine.tokens(seq) == (5,)


def test_an_engine_that_nobody_has_is_gone_with_its_memory(make_engine: MakeEngine) -> None:
    """At once: no cycle keeps it until garbage is collected."""
    engine = make_engine()
    seq = engine.create()
    engine.feed(seq, [1, 2, 3])
    assert [piece.token for piece in engine.generate(seq, 4)]
    memory = weakref.ref(engine._memory)
    gc.disable()
    try:
        del engine
        assert memory() is None
    finally:
        gc.enable()
