"""What goes wrong with guesses costs nothing that was said: a drafter is a hint, and a batch is shared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine import edits, stepping
from engine.errors import EngineError, NoSlot, StateError
from engine.passes import Computed, compute
from engine.scheduler import Options, Said, Scheduler
from engine.speculative.model_drafter import ModelDrafter
from engine.state import DraftState, Fingerprint
from tests.engine.conftest import MakeEngine
from tests.engine.pictures import picture
from tests.engine.speculative.guessing import Told, continuation
from tests.engine.speculative.test_steps import PROMPT, begin, ids, plain
from tests.exact.members import open_member

VERBS = ("observe", "propose", "cut", "copy", "snapshot", "restore")


class Broken(Exception):
    """No error of ours."""


def failing(drafter: Told, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise Broken(verb)

    monkeypatch.setattr(drafter, verb, fail)


@pytest.mark.parametrize("verb", VERBS)
def test_a_drafter_that_fails_is_not_asked_again_and_nothing_is_lost(
    verb: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, single = make_engine(deterministic=True), make_engine(deterministic=True)
    whole = plain(engine, 40)
    drafter = Told(continuation(whole, lambda position: position % 3 == 0))
    drafter.fingerprint = Fingerprint({"drafter": "told"})
    engine.speculate(drafter, 3)
    first = begin(engine)
    engine.step(first)
    state = engine.snapshot(first)
    failing(drafter, verb, monkeypatch)
    assert engine.draft_failure is None
    second = engine.fork(first)
    engine.step(second)
    engine.advance({first: whole[engine.length(first) :][:1], second: whole[engine.length(second) :][:1]})
    engine.rewind(first, len(PROMPT))
    engine.step(first)
    third = engine.create()
    engine.feed(third, whole[:14])
    for seq in (first, second, third):
        assert engine.snapshot(seq).tokens == tuple(whole[: engine.length(seq)])
    draft = DraftState(drafter.fingerprint, (), 3, (), ())
    if verb == "restore":
        with pytest.raises(StateError, match="failed: restore"):
            engine.restore(replace(state, draft=draft))
    assert isinstance(engine.draft_failure, Broken)
    assert "failed" in (engine.draft_refusal(drafter.fingerprint) or "")
    fourth = engine.restore(replace(state, draft=draft))
    for seq in (first, second, third, fourth):
        left = [piece.token for piece in engine.generate(seq, max_tokens=10)]
        assert ids(engine, seq)[-10:] == left
        assert ids(engine, seq) == plain(single, len(ids(engine, seq)) - len(PROMPT))


@pytest.mark.parametrize("rollback", [0, 4])
@pytest.mark.parametrize("family", ["llama", "mamba2"])
@pytest.mark.parametrize("good", range(4))
def test_logits_that_are_no_numbers_end_a_reply_where_they_do_without_guesses(
    good: int, family: str, rollback: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_member(family, "f32", deterministic=True, rollback=rollback)
    whole = plain(engine, 20)
    engine.speculate(Told(continuation(whole, lambda position: position > len(PROMPT) + 2)), 4)
    seq = begin(engine)
    engine.choose(seq)
    last = len(PROMPT) + good  # the last token behind which there are numbers

    def damaged(*args: Any) -> Computed:
        found = compute(*args)
        for of, logits in found.logits.items():
            end = args[3][of][0] + len(args[3][of][1])
            rows = torch.arange(end - len(logits), end) > last
            found.logits[of] = logits.masked_fill(rows[:, None], float("nan"))
        return found

    monkeypatch.setattr(stepping, "compute", damaged)
    monkeypatch.setattr(edits, "compute", damaged)
    assert [engine.say(seq) for _ in range(good + 1)] == whole[len(PROMPT) + 1 :][: good + 1]
    with pytest.raises(EngineError, match="not numbers"):
        engine.say(seq)


@pytest.mark.parametrize("family", ["mamba2", "recurrent_gemma"])
def test_when_reading_again_fails_each_sequence_of_the_batch_is_before_or_behind_it(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has to be read again, the next one is rolled back, the last one had no guesses."""
    engine = open_member(family, "f32", deterministic=True, rollback=2)
    whole = plain(engine, 20)
    seqs = [begin(engine) for _ in range(3)]
    for seq in seqs:
        engine.choose(seq)
    before = picture(engine, seqs[0])
    right, wrong = whole[len(PROMPT) + 1], (whole[len(PROMPT) + 1] + 1) % 250
    with monkeypatch.context() as patch:
        patch.setattr(edits, "compute", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.advance(
                {seq: whole[len(PROMPT) :][:1] for seq in seqs},
                {seqs[0]: (wrong, 1, 2, 3), seqs[1]: (right, wrong)},
            )
    assert picture(engine, seqs[0]) == before
    for seq in seqs:
        at = ids(engine, seq)
        assert at == whole[: len(at)]
        said = [engine.decode([seq])[seq] for _ in range(5)]
        assert [*at, *said] == whole[: len(at) + 5]


def test_where_there_is_room_for_one_token_it_is_said_without_guesses(make_engine: MakeEngine) -> None:
    engine = make_engine(deterministic=True, n_ctx=64, num_cells=64, num_seqs=2)
    whole = plain(engine, 40)
    engine.speculate(Told(continuation(whole, lambda position: False)), 5)
    seq, other = begin(engine), engine.create()
    engine.feed(other, range(64 - len(PROMPT) - 8))
    said = [engine.say(seq) for _ in range(9)]
    assert said == whole[len(PROMPT) :][:9]
    with pytest.raises(NoSlot):
        engine.say(seq)
    assert ids(engine, seq) == whole[: len(PROMPT) + 9]


@pytest.mark.parametrize("kept", [True, False])
def test_when_what_was_kept_cannot_be_read_again_nothing_old_is_said_anew(
    kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {} if kept else {"checkpoint_bytes": 0}
    engine = open_member("mamba2", "f32", deterministic=True, **sizes)
    whole = plain(engine, 20)
    engine.speculate(Told(continuation(whole, lambda position: True)), 4)
    seq = begin(engine)
    engine.choose(seq)

    def full(*args: Any) -> Computed:
        raise NoSlot("no room")

    monkeypatch.setattr(edits, "compute", full)
    if kept:  # it stands where it stood before the guesses
        assert engine.step(seq) == tuple(whole[len(PROMPT) + 1 :][:1])
    else:
        with pytest.raises(NoSlot):
            engine.step(seq)


def test_an_error_in_a_batch_of_guesses_leaves_the_reply_where_it_was_read(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(deterministic=True)
    whole = plain(engine, 20)
    engine.speculate(Told(continuation(whole, lambda position: position % 3 == 0)), 4)
    seq = begin(engine)
    said = [engine.choose(seq)]
    while len(said) < 15:
        with monkeypatch.context() as patch:
            patch.setattr(engine._model, "forward", lambda *_: 1 / 0)
            if not engine._slots._ahead:
                with pytest.raises(ZeroDivisionError):
                    engine.say(seq)
        said.append(engine.say(seq))
    assert said == whole[len(PROMPT) :][:15]


def test_a_draft_model_without_numbers_guesses_nothing(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, model = make_engine(deterministic=True), make_engine(num_seqs=5)
    whole = plain(engine, 20)
    engine.speculate(ModelDrafter(model, engine), 3)
    seq = begin(engine)
    with monkeypatch.context() as patch:
        patch.setattr(
            model._model,
            "forward",
            lambda tokens, positions, view, outputs: torch.full((1, 260), float("nan")),
        )
        assert [piece.token for piece in engine.generate(seq, max_tokens=5)] == whole[len(PROMPT) :][:5]
    assert engine.draft_failure is None


def test_requests_of_a_scheduler_go_on_without_a_drafter_that_failed(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, single = make_engine(deterministic=True), make_engine(deterministic=True)
    whole = plain(single, 12)
    drafter = Told(lambda tokens, count: (1, 2))
    engine.speculate(drafter, 3)
    failing(drafter, "observe", monkeypatch)
    scheduler = Scheduler(engine)
    seqs = [engine.create() for _ in range(3)]
    names = [scheduler.submit(seq, PROMPT, Options(max_tokens=12)) for seq in seqs]
    said: dict[int, list[int | None]] = {name: [] for name in names}
    while len(scheduler):
        for event in scheduler.step():
            assert isinstance(event, Said)
            said[event.request].append(event.piece.token)
    assert all(tokens == whole[len(PROMPT) :] for tokens in said.values())
