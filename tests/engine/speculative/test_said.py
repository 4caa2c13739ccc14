"""However much a step gives at once, a sequence is as far as its reply was read, for whoever looks at it."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from engine import edits
from engine.config import EngineConfig
from engine.loader import load_engine
from engine.runner import Engine
from engine.speculative.choice import Draft
from engine.state import Pending, SamplerParams, SeqId
from tests.engine.conftest import MakeEngine
from tests.engine.pictures import picture
from tests.engine.speculative.guessing import Told, continuation
from tests.engine.speculative.test_steps import PROMPT, begin, ids, plain
from tests.exact.members import open_member
from tests.oracles import qwen3_next_mtp

OTHER = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def drafting(engine: Engine, sampler: SamplerParams | None = None) -> list[int]:
    """Let all that is guessed be right; the prompt and what follows it."""
    whole = plain(engine, 40, sampler)
    engine.speculate(Told(continuation(whole, lambda position: False)), 5)
    return whole


@pytest.mark.parametrize("rollback", [0, 5])
@pytest.mark.parametrize("family", ["llama", "gemma3", "mamba2", "deepseek_v4"])
def test_between_two_pieces_it_is_as_if_each_had_a_step_of_its_own(family: str, rollback: int) -> None:
    engine = open_member(family, "f32", deterministic=True, rollback=rollback)
    other = open_member(family, "f32", deterministic=True)
    whole = drafting(engine)
    seq, same = begin(engine), begin(other)
    pieces = engine.generate(seq)
    for count in range(1, 15):
        assert next(pieces).token == other.decode([same])[same]
        if count % 4:
            continue
        assert ids(engine, seq) == whole[: len(PROMPT) + count]
        assert picture(engine, seq)["tokens"] == picture(other, same)["tokens"]
        mine, theirs = engine.snapshot(seq), other.snapshot(same)
        assert mine.canary == theirs.canary
        assert mine.edge == theirs.edge
        fork = engine.fork(seq)
        assert engine.decode([fork])[fork] == whole[len(PROMPT) + count]
        engine.rewind(fork, 0)
        engine.close(fork)


def test_who_reads_on_later_misses_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(deterministic=True)
    whole = drafting(engine)
    seq = begin(engine)
    said = [next(engine.generate(seq)).token for _ in range(20)]
    assert said == whole[len(PROMPT) :][:20]
    assert engine.figures is not None
    assert engine.figures.steps < 6, "and what was sampled ahead is not sampled again"


def test_a_reply_that_nobody_reads_any_more_takes_nothing_back(make_engine: MakeEngine) -> None:
    engine = make_engine(deterministic=True)
    drafting(engine)
    seq = begin(engine)
    abandoned = engine.generate(seq)
    for _ in range(3):
        next(abandoned)
    engine.feed(seq, OTHER)
    fed = engine.tokens(seq)
    del abandoned
    gc.collect()
    assert engine.tokens(seq) == fed


def test_nor_from_who_has_the_sequences_id_next(make_engine: MakeEngine) -> None:
    engine = make_engine(deterministic=True, num_seqs=1)
    drafting(engine)
    seq = begin(engine)
    abandoned = engine.generate(seq)
    for _ in range(3):
        next(abandoned)
    engine.close(seq)
    news: list[SeqId] = []
    while not news or news[-1] != seq:
        news.append(engine.create())
        engine.feed(news[-1], OTHER)
        engine.close(news[-1])
    new = engine.create()
    engine.feed(new, OTHER)
    abandoned.close()  # type: ignore[attr-defined]  # it is a generator
    assert engine.tokens(new) == tuple(OTHER)


def test_who_closes_a_sequence_waits_for_nothing_to_be_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_member("mamba2", "f32", deterministic=True, rollback=0)
    whole = drafting(engine)
    seq = begin(engine)
    pieces = engine.generate(seq)
    for _ in range(3):
        next(pieces)
    with monkeypatch.context() as patch:
        patch.setattr(edits, "compute", lambda *args: 1 / 0)
        engine.close(seq)
    again = engine.create()
    assert engine.feed(again, whole[:30]).shared > len(PROMPT) + 3, "what was ahead is known all the same"
    assert engine.decode([again])[again] == whole[30]


def test_a_reply_that_is_cancelled_ends_with_the_token_before(make_engine: MakeEngine) -> None:
    engine = make_engine(deterministic=True)
    whole = drafting(engine)
    for count in range(9):
        seq, said = begin(engine), list[int | None]()
        for piece in engine.generate(seq, cancel=lambda count=count, said=said: len(said) == count):  # type: ignore[misc]
            said.append(piece.token)
        assert said == [*whole[len(PROMPT) :][:count], None]
        engine.rewind(seq, 0)
        engine.close(seq)


def test_who_samples_otherwise_does_so_from_the_next_token_on(make_engine: MakeEngine) -> None:
    engine, other = make_engine(deterministic=True), make_engine(deterministic=True)
    first, then = SamplerParams(temperature=0.9, seed=5), SamplerParams(temperature=1.5, seed=6)
    whole = drafting(engine, first)
    seq, same = begin(engine, first), begin(other, first)
    pieces = engine.generate(seq)
    for _ in range(8):
        assert next(pieces).token == other.decode([same])[same]
    engine.speculate(Told(lambda tokens, count: (), seen={seq: list(engine.tokens(seq))}), 5)
    engine.set_sampler(seq, then)
    other.set_sampler(same, then)
    said = [next(pieces).token for _ in range(8)]
    assert said == [other.decode([same])[same] for _ in range(8)] != whole[len(PROMPT) + 8 :][:8]


def test_a_token_of_ones_own_is_put_behind_what_was_said(make_engine: MakeEngine) -> None:
    engine = make_engine(deterministic=True)
    whole = drafting(engine)
    seq = begin(engine)
    pieces = engine.generate(seq)
    for _ in range(3):
        next(pieces)
    engine.set_pending(seq, 77)
    assert ids(engine, seq) == [*whole[: len(PROMPT) + 2], 77]
    assert engine.edge(seq) == Pending(77)


def test_a_drafter_sees_what_is_read_again(tmp_path: Path) -> None:
    """Hidden states too: it guesses at once, as if the sequence had never been longer."""
    qwen3_next_mtp.oracle(share=0.15).write(tmp_path)
    config = {"n_ctx": 256, "threads": 1, "dtype": "f32", "deterministic": True}
    engine = load_engine(tmp_path, EngineConfig.from_mapping(config), draft=Draft("mtp", 3))
    seq = begin(engine)
    engine.choose(seq)
    for _ in range(4):
        engine.step(seq)
    guesses = engine.propose(seq)
    before = engine.length(seq)
    said = [engine.say(seq) for _ in range(12)]
    engine.unsay(seq, len(said))
    assert engine.length(seq) == before
    assert engine.propose(seq) == guesses != ()
