"""What a hosted engine says: draws, guesses, canaries, and whose states it believes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.errors import EngineError, FingerprintMismatch
from engine.runner import Engine
from engine.speculative.ngram import NgramDrafter
from engine.state import SamplerParams, SeqId
from tests.engine.hosted.models import forget, hosted, ids, tiny

LINE = ids(60)


def test_draws_are_a_function_of_seed_and_position(bamba: Engine) -> None:
    params = SamplerParams(temperature=1.0, seed=11)
    whole = bamba.create(params)
    bamba.feed(whole, LINE[:20])
    expected = [piece.token for piece in bamba.generate(whole, 16)]
    forget(bamba, whole)
    parts = bamba.create(params)
    bamba.feed(parts, LINE[:20])
    found = [piece.token for piece in bamba.generate(parts, 7)]
    restored = bamba.restore(bamba.snapshot(parts))
    found += [piece.token for piece in bamba.generate(restored, 9)]
    assert found == expected
    assert len(set(expected)) > 3
    forget(bamba, parts, restored)


class Guessing(NgramDrafter):
    """Nearly always wrong."""

    def propose(self, seq: SeqId, tokens: Sequence[int], sampler: SamplerParams, count: int) -> Sequence[int]:
        return [7, 8, 9, 10, 11][:count]


@pytest.mark.parametrize("family", ["llama", "mistral", "bamba", "mamba"])
def test_guesses_are_taken_back_and_change_nothing_that_is_said(family: str) -> None:
    said = []
    for guesses in (False, True):
        engine = hosted(tiny(family))
        if guesses:
            engine.speculate(Guessing(), 3)
        seq = engine.create()
        engine.feed(seq, LINE[:30])
        said.append([piece.token for piece in engine.generate(seq, 12)])
    assert engine.figures is not None
    assert engine.figures.accepted < engine.figures.drafted
    assert said[0] == said[1]


def test_the_canary_agrees_where_the_last_token_can_be_computed_again(
    llama: Engine, gemma: Engine, bamba: Engine
) -> None:
    for engine in (llama, gemma, bamba):
        seq = engine.create()
        engine.feed(seq, LINE[:25])
        engine.mark(seq)
        engine.feed(seq, LINE[25:40])
        state = engine.snapshot(seq)
        assert state.canary is not None
        restored = engine.restore(state)
        assert engine.canary_drift(restored, state.canary) < 1e-3
        wrong = replace(state.canary, logits=tuple(x + 1 for x in state.canary.logits))
        assert engine.canary_drift(restored, wrong) > 0.9
        forget(engine, seq, restored)


def test_a_state_of_other_weights_is_refused_by_name(llama: Engine) -> None:
    other = hosted(tiny("llama", seed=1))
    seq = other.create()
    other.feed(seq, LINE[:5])
    with pytest.raises(FingerprintMismatch, match="weights"):
        llama.restore(other.snapshot(seq))


def test_an_id_without_text_is_no_text(llama: Engine) -> None:
    seq = llama.create()
    llama.feed(seq, LINE[:5])
    pieces = list(llama.generate(seq, 4))
    assert [piece.text for piece in pieces] == [""] * 4
    with pytest.raises(EngineError):
        llama.feed(seq, [300])
    forget(llama, seq)
