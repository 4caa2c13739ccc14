"""An engine that drafts says what it would say anyway, in fewer steps, and stands where it would stand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.errors import ConfigError, ContextFull
from engine.runner import Engine
from engine.scheduler import Options, Said, Scheduler
from engine.speculative.model_drafter import ModelDrafter
from engine.speculative.ngram import NgramDrafter
from engine.state import Pending, SamplerParams, SeqId
from tests.engine.conftest import MakeEngine
from tests.engine.speculative.guessing import Told, continuation
from tests.exact.members import open_member

PROMPT = [7, 30, 31, 32, 7, 30, 31, 32, 9, 7]
SAMPLERS = {"greedy": SamplerParams(), "sampled": SamplerParams(temperature=0.9, seed=5, repeat_penalty=1.1)}
PATTERNS: dict[str, Callable[[int], bool]] = {
    "always right": lambda position: False,
    "always wrong": lambda position: True,
    "every third wrong": lambda position: position % 3 == 0,
}


def begin(engine: Engine, sampler: SamplerParams | None = None) -> SeqId:
    seq = engine.create(sampler)
    engine.feed(seq, PROMPT)
    return seq


def plain(engine: Engine, count: int, sampler: SamplerParams | None = None) -> list[int]:
    """Prompt and what follows, token by token."""
    seq = begin(engine, sampler)
    tokens = [engine.decode([seq])[seq] for _ in range(count)]
    engine.rewind(seq, 0)
    engine.close(seq)
    return [*PROMPT, *tokens]


def ids(engine: Engine, seq: SeqId) -> list[int]:
    edge = engine.edge(seq)
    return [*engine.tokens(seq), *([edge.token] if isinstance(edge, Pending) else [])]


@pytest.mark.parametrize("sampling", SAMPLERS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_same_is_said_whatever_is_guessed(make_engine: MakeEngine, pattern: str, sampling: str) -> None:
    engine, sampler = make_engine(deterministic=True), SAMPLERS[sampling]
    whole = plain(engine, 40, sampler)
    engine.speculate(Told(continuation(whole, PATTERNS[pattern])), 4)
    seq = begin(engine, sampler)
    steps = 0
    while len(ids(engine, seq)) < len(whole) - 5:
        engine.step(seq)
        steps += 1
        assert ids(engine, seq) == whole[: len(ids(engine, seq))]
    figures = engine.figures
    assert figures is not None
    if pattern == "always right":
        assert figures.accepted == figures.drafted
        assert steps == 1 + 7
    if pattern == "always wrong":
        assert figures.accepted == 0


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v4", "mamba2", "qwen3_next", "qwen4_exp"])
@pytest.mark.parametrize("rollback", [0, 2, 4])
def test_members_that_cannot_go_back_far_enough_read_again_and_say_so(family: str, rollback: int) -> None:
    engine = open_member(family, "f32", deterministic=True, rollback=rollback)
    whole = plain(engine, 24)
    engine.speculate(Told(continuation(whole, PATTERNS["every third wrong"])), 4)
    seq = begin(engine)
    while len(ids(engine, seq)) < len(whole) - 5:
        engine.step(seq)
    assert ids(engine, seq) == whole[: len(ids(engine, seq))]
    figures = engine.figures
    assert figures is not None
    assert 0 < figures.accepted < figures.drafted
    assert figures.replayed <= figures.accepted + figures.steps, "no more than was fed and kept"
    recurrent = family not in ("llama", "gemma3")
    assert (figures.replayed > 0) == (recurrent and rollback < 4)


@pytest.mark.parametrize("rollback", range(5))
def test_of_guesses_that_are_all_wrong_only_what_was_fed_is_read_again(rollback: int) -> None:
    engine = open_member("mamba2", "f32", deterministic=True, rollback=rollback)
    whole = plain(engine, 24)
    engine.speculate(Told(continuation(whole, PATTERNS["always wrong"])), 4)
    seq = begin(engine)
    engine.choose(seq)
    for _ in range(6):
        engine.step(seq)
    assert engine.figures is not None
    assert engine.figures.replayed == (6 if rollback < 4 else 0)


def test_what_is_longer_than_a_batch_is_read_again_in_batches() -> None:
    sizes = {"max_batch": 8, "max_ubatch": 8, "checkpoint_bytes": 0}
    engine = open_member("mamba2", "f32", deterministic=True, **sizes)
    whole = plain(engine, 16)
    engine.speculate(Told(continuation(whole, PATTERNS["always wrong"])), 4)
    assert [piece.token for piece in engine.generate(begin(engine), max_tokens=8)] == whole[len(PROMPT) :][:8]
    assert engine.figures is not None
    assert engine.figures.replayed > 8 * engine.figures.steps


def test_a_reply_that_is_closed_early_was_said_only_as_far_as_it_was_read(make_engine: MakeEngine) -> None:
    engine = make_engine(deterministic=True)
    whole = plain(engine, 30)
    engine.speculate(Told(continuation(whole, PATTERNS["always right"])), 6)
    for count in range(1, 14):
        seq = begin(engine)
        pieces = engine.generate(seq)
        said = [next(pieces).token for _ in range(count)]
        pieces.close()  # type: ignore[attr-defined]  # it is a generator
        assert ids(engine, seq) == [*PROMPT, *said] == whole[: len(PROMPT) + count]
        assert [engine.decode([seq])[seq]] == whole[len(PROMPT) + count :][:1], "and it goes on from there"
        engine.rewind(seq, 0)
        engine.close(seq)


@pytest.mark.parametrize("most", [1, 2, 3, 7, 16])
def test_no_more_tokens_come_than_were_asked_for(make_engine: MakeEngine, most: int) -> None:
    engine = make_engine(deterministic=True)
    whole = plain(engine, 40)
    engine.speculate(Told(continuation(whole, PATTERNS["always right"])), 5)
    seq = begin(engine)
    pieces = list(engine.generate(seq, max_tokens=most))
    assert [piece.token for piece in pieces] == whole[len(PROMPT) :][:most]
    assert pieces[-1].finish == "length"


def test_a_full_context_ends_where_it_would(make_engine: MakeEngine) -> None:
    engine = make_engine(deterministic=True, n_ctx=32, num_cells=256)
    whole = plain(engine, 23)
    engine.speculate(Told(continuation([*whole, 0, 0, 0], PATTERNS["always right"])), 5)
    seq = begin(engine)
    pieces = list(engine.generate(seq))
    assert pieces[-1].finish == "context"
    assert ids(engine, seq) == whole
    with pytest.raises(ContextFull):
        engine.step(seq)


def test_a_stop_text_within_the_guesses_ends_the_reply_there(make_engine: MakeEngine) -> None:
    engine = make_engine(deterministic=True)
    whole = plain(engine, 40)
    seq = begin(engine)
    text = "".join(piece.text for piece in engine.generate(seq, max_tokens=30))
    stop = next(c for c in text[3:] if text.count(c) >= 1 and c.isprintable())
    alone = begin(engine)
    expected = list(engine.generate(alone, stop=(stop,), max_tokens=30))
    stood = ids(engine, alone)
    drafting = make_engine(deterministic=True)
    drafting.speculate(Told(continuation(whole, PATTERNS["always right"])), 6)
    again = begin(drafting)
    assert list(drafting.generate(again, stop=(stop,), max_tokens=30)) == expected
    assert ids(drafting, again) == stood


@pytest.mark.parametrize("rollback", [0, 4])
def test_checkpoints_are_where_they_are_without_guesses(rollback: int) -> None:
    sizes = {"deterministic": True, "checkpoint_every": 8}
    engine, other = (open_member("mamba2", "f32", rollback=n, **sizes) for n in (rollback, 0))
    whole = plain(other, 50)
    engine.speculate(Told(continuation(whole, PATTERNS["every third wrong"])), 4)
    seq, same = begin(engine), begin(other)
    while engine.length(seq) < 45:
        engine.step(seq)
    while other.length(same) < engine.length(seq):
        other.decode([same])
    mine, theirs = (
        [point.position for point in e.snapshot(s).points] for e, s in ((engine, seq), (other, same))
    )
    assert set(theirs) <= set(mine)
    assert rollback == 0 or mine == theirs


def test_guesses_passed_by_hand_do_not_skip_a_checkpoint() -> None:
    engine = open_member("mamba2", "f32", rollback=4, deterministic=True, checkpoint_every=8)
    whole = plain(engine, 20)
    seq = begin(engine)
    engine.advance({seq: whole[len(PROMPT) : 14]})
    engine.advance({seq: whole[14:15]}, {seq: whole[15:18]})
    assert [point.position for point in engine.snapshot(seq).points] == [8, 18]


def test_forks_rewinds_and_shared_prefixes_are_told_to_the_drafter(make_engine: MakeEngine) -> None:
    engine = make_engine(deterministic=True)
    whole = plain(engine, 40)
    drafter = Told(continuation(whole, PATTERNS["every third wrong"]))
    engine.speculate(drafter, 3)
    first = begin(engine)
    for _ in range(3):
        engine.step(first)
    second = engine.fork(first)
    engine.step(second)
    engine.rewind(first, 8)
    assert ids(engine, first) == whole[:9]
    engine.step(first)
    third = engine.create()
    engine.feed(third, whole[:14])
    engine.step(third)
    for seq in (first, second, third):
        assert drafter.seen[seq] == list(engine.tokens(seq))


def test_requests_of_a_scheduler_draft_side_by_side(make_engine: MakeEngine) -> None:
    engine, single = make_engine(deterministic=True), make_engine(deterministic=True)
    texts = ("abcabcabcabc", "the the the the", "xyzxyzxyz")
    engine.speculate(NgramDrafter(), 4)
    scheduler, options = Scheduler(engine), Options(max_tokens=20)
    names = {}
    for text in texts:
        names[scheduler.submit(engine.create(), engine.tokenizer.encode(text), options)] = text
    pieces: dict[str, list[object]] = {text: [] for text in texts}
    while len(scheduler):
        for event in scheduler.step():
            assert isinstance(event, Said)
            pieces[names[event.request]].append(event.piece)
    for text in texts:
        seq = single.create()
        single.feed(seq, single.tokenizer.encode(text))
        assert pieces[text] == list(single.generate(seq, max_tokens=20))
    assert engine.figures is not None
    assert engine.figures.drafted > 0


def test_a_batch_of_guesses_is_one_pass(make_engine: MakeEngine) -> None:
    """Windows have cells for one pass beside what they need, so that it can be taken back."""
    engine = make_engine(max_ubatch=3)
    engine.speculate(Told(lambda tokens, count: [5] * 9), 4)
    seq = begin(engine)
    engine.choose(seq)
    assert engine.propose(seq) == (5, 5)


def test_guesses_that_are_no_ids_of_the_model_are_left_out(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.speculate(Told(lambda tokens, count: [5, 10**9, 6]), 3)
    seq = begin(engine)
    engine.step(seq)
    assert engine.propose(seq) == (5,)


def test_a_drafter_needs_room_for_a_guess_and_a_model_that_shows_what_it_wants(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine()
    with pytest.raises(ConfigError, match="draft_max"):
        engine.speculate(NgramDrafter(), 0)
    with pytest.raises(ConfigError, match="hidden"):
        engine.speculate(Told(lambda tokens, count: (), wants_hidden=True), 1)


def test_two_engines_of_one_file_agree_about_all_guesses(make_engine: MakeEngine) -> None:
    for sampler in SAMPLERS.values():
        engine, drafting = make_engine(deterministic=True), make_engine(deterministic=True, num_seqs=5)
        whole = plain(engine, 30, sampler)
        engine.speculate(ModelDrafter(drafting, engine), 4)
        seq = begin(engine, sampler)
        said = [piece.token for piece in engine.generate(seq, max_tokens=30)]
        assert [*PROMPT, *said] == whole
        assert engine.figures is not None
        assert engine.figures.accepted == engine.figures.drafted
