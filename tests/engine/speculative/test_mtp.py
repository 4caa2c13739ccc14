"""A model's own layers as its drafter: what they guess, and when it is right, is what their oracle says; and
what they know goes where the sequence goes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch import Batch
from engine.cache.memory import Plan
from engine.config import EngineConfig
from engine.errors import ConfigError, FingerprintMismatch, NoSlot, StateError
from engine.loader import load_engine
from engine.runner import Engine
from engine.speculative.choice import Draft
from engine.speculative.mtp import WAITING, MtpDrafter
from engine.state import DraftState, PartKind, Pending, SamplerParams, SeqId, parts_of
from tests.engine.weights.folders import VOCAB
from tests.oracles import deepseek_v3_mtp, qwen3_next_mtp
from tests.oracles.base import tokens, write
from tests.oracles.mtp import ORDINARY, Oracle

SHARE = 0.15  # what is said can be foreseen, but not always
CASES: dict[str, tuple[Callable[..., Oracle], dict[str, Any]]] = {
    "deepseek_v3, depth 1": (deepseek_v3_mtp.oracle, {"num_depths": 1}),
    "deepseek_v3, depth 2": (deepseek_v3_mtp.oracle, {"num_depths": 2}),
    "qwen3_next": (qwen3_next_mtp.oracle, {}),
}
PROMPT = tokens(3, 20)
COUNT = 41
#: as the oracles choose, who never end
GREEDY = SamplerParams(logit_bias=tuple((token, -math.inf) for token in range(ORDINARY, VOCAB)))


def oracle_of(name: str) -> Oracle:
    make, changes = CASES[name]
    return make(share=SHARE, **changes)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Oracle, Path]:
    oracle = oracle_of(request.param)
    oracle.write(tmp_path)
    return oracle, tmp_path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With two depths."""
    oracle_of("deepseek_v3, depth 2").write(tmp_path)
    return tmp_path


def open_drafting(folder: Path, most: int | None = 3, **settings: Any) -> Engine:
    plain = {"dtype": "f32", "type_k": "f32", "type_v": "f32", "threads": 1}
    sizes = {"n_ctx": 256, "max_batch": 64, "max_ubatch": 64, "num_seqs": 4, "num_cells": 1024}
    config = EngineConfig.from_mapping({**plain, **sizes, **settings})
    return load_engine(folder, config, draft=None if most is None else Draft("mtp", most))


def mtp_of(engine: Engine) -> MtpDrafter:
    drafter = engine.drafter
    assert isinstance(drafter, MtpDrafter)
    return drafter


def begin(engine: Engine, prompt: Sequence[int] = PROMPT, sampler: SamplerParams = GREEDY) -> SeqId:
    """A sequence that has read the prompt, and whose first token is pending."""
    seq = engine.create(sampler)
    engine.feed(seq, prompt)
    engine.choose(seq)
    return seq


def ids(engine: Engine, seq: SeqId) -> list[int]:
    edge = engine.edge(seq)
    return [*engine.tokens(seq), *([edge.token] if isinstance(edge, Pending) else [])]


def go_on(engine: Engine, seq: SeqId, length: int) -> list[int]:
    """Step until there are `length` ids. How many guesses were right, at each step."""
    accepted = []
    while (left := length - len(ids(engine, seq))) > 0:
        accepted.append(len(engine.step(seq, left)) - 1)
    return accepted


# -- what is guessed -----------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_the_guesses_that_are_right_are_those_of_the_oracle(case: tuple[Oracle, Path], most: int) -> None:
    """At every step; also where there are more guesses than depths, and fewer."""
    oracle, folder = case
    said, accepted = oracle.speculate(PROMPT, COUNT, most)
    engine = open_drafting(folder, most)
    seq = begin(engine)
    assert go_on(engine, seq, len(PROMPT) + COUNT) == accepted
    assert ids(engine, seq) == [*PROMPT, *said]
    assert 0 < sum(accepted) < most * len(accepted), "some are right and some are not"


def test_every_guess_is_the_oracles(case: tuple[Oracle, Path]) -> None:
    oracle, folder = case
    engine = open_drafting(folder, 4)
    seq = begin(engine)
    while len(known := ids(engine, seq)) < len(PROMPT) + 30:
        assert list(engine.propose(seq)) == oracle.draft(known, 4)
        engine.step(seq)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_is_said_is_what_is_said_without_guesses(case: tuple[Oracle, Path], temperature: float) -> None:
    _, folder = case
    said: list[list[int]] = []
    for most in (None, 3):
        engine = open_drafting(folder, most, deterministic=True)
        seq = begin(engine, sampler=SamplerParams(temperature=temperature, seed=3, top_k=40))
        go_on(engine, seq, len(PROMPT) + COUNT)
        said.append(ids(engine, seq))
    assert said[0] == said[1]


def test_a_draft_draws_as_the_target_does(folder: Path) -> None:
    """Of the same numbers: otherwise most guesses at what is drawn would be wrong."""
    engine = open_drafting(folder, 1)
    for seed in range(8):
        seq = begin(engine, sampler=SamplerParams(temperature=0.5, seed=seed))
        go_on(engine, seq, len(PROMPT) + 20)
        engine.rewind(seq, 0)
        engine.close(seq)
    figures = engine.figures
    assert figures is not None
    assert figures.accepted > 0.25 * figures.drafted


def test_a_model_without_such_layers_is_refused(tmp_path: Path) -> None:
    write("deepseek_v3", tmp_path)
    with pytest.raises(ConfigError, match="no layers that predict"):
        open_drafting(tmp_path)


# -- where sequences go ----------------------------------------------------------------------------------


def rows_of(engine: Engine, seq: SeqId) -> DraftState:
    state = mtp_of(engine).snapshot(seq, engine.tokens(seq))
    assert state is not None
    return state


def check_same(ours: DraftState, theirs: DraftState, atol: float = 0.0) -> None:
    """Rows and hidden states at the end, float32, within `atol`."""
    assert ours.length == theirs.length
    pairs = zip(
        [*(part for run in ours.rows for part in run.parts), *ours.points[-1].parts],
        [*(part for run in theirs.rows for part in run.parts), *theirs.points[-1].parts],
        strict=True,
    )
    for our, their in pairs:
        difference = (our.flatten().view(torch.float32) - their.flatten().view(torch.float32)).abs().max()
        assert float(difference) <= atol


def test_nothing_stays_of_a_guess(case: tuple[Oracle, Path]) -> None:
    """Rows after many guesses are those of a sequence that was never guessed about."""
    _, folder = case
    engine = open_drafting(folder, 4, deterministic=True)
    seq = begin(engine)
    go_on(engine, seq, len(PROMPT) + COUNT)
    other = open_drafting(folder, 4, deterministic=True)
    read = begin(other, engine.tokens(seq))
    check_same(rows_of(engine, seq), rows_of(other, read))


def test_a_question_changes_nothing(folder: Path) -> None:
    engine = open_drafting(folder)
    seq = begin(engine)
    before = rows_of(engine, seq)
    assert engine.propose(seq) == engine.propose(seq)
    check_same(rows_of(engine, seq), before)


@pytest.mark.parametrize("chunk", [1, 3, WAITING + 1, WAITING + 9])
def test_what_waits_is_read_in_time(folder: Path, chunk: int) -> None:
    """However many tokens the target reads at a time."""
    prompt, whole = tokens(5, 100), open_drafting(folder)
    seq = begin(whole, prompt)
    engine = open_drafting(folder, max_batch=chunk, max_ubatch=chunk)
    other = begin(engine, prompt)
    known = ids(whole, seq)
    assert mtp_of(whole).propose(seq, known, GREEDY, 3) == mtp_of(engine).propose(other, known, GREEDY, 3)
    check_same(rows_of(engine, other), rows_of(whole, seq), atol=1e-5)


def test_a_fork_guesses_what_its_source_does(case: tuple[Oracle, Path]) -> None:
    _, folder = case
    engine = open_drafting(folder)
    seq = begin(engine)
    go_on(engine, seq, len(PROMPT) + 9)
    fork = engine.fork(seq)
    assert engine.propose(fork) == engine.propose(seq)
    assert go_on(engine, fork, len(PROMPT) + 30) == go_on(engine, seq, len(PROMPT) + 30)


def test_a_shared_prefix_is_known_to_the_drafter(folder: Path) -> None:
    oracle, engine = oracle_of("deepseek_v3, depth 2"), open_drafting(folder)
    long = tokens(7, 60)
    engine.feed(engine.create(), long)
    seq = engine.create()
    assert engine.feed(seq, [*long[:50], *PROMPT]).shared == 50
    state = mtp_of(engine).snapshot(seq, engine.tokens(seq))
    assert state is not None
    assert state.length == 50 + len(PROMPT) - 2
    engine.choose(seq)
    # The hidden states of the last shared tokens are gone, and their two rows are not quite what they were.
    assert list(engine.propose(seq))[:1] == oracle.draft(ids(engine, seq), 1)


def test_after_a_cut_it_guesses_once_the_target_has_read_again(folder: Path) -> None:
    oracle, engine = oracle_of("deepseek_v3, depth 2"), open_drafting(folder)
    seq = begin(engine, tokens(7, 60))
    engine.rewind(seq, 30)
    assert engine.propose(seq) == ()
    engine.step(seq)
    assert len(engine.propose(seq)) == 3
    go_on(engine, seq, 50)
    assert mtp_of(engine).snapshot(seq, engine.tokens(seq)) is not None
    assert list(engine.propose(seq))[:1] == oracle.draft(ids(engine, seq), 1)


def test_a_cut_to_where_a_state_was_taken_is_exact(folder: Path) -> None:
    engine = open_drafting(folder, deterministic=True)
    seq = begin(engine)
    state, guesses = rows_of(engine, seq), engine.propose(seq)
    pending = ids(engine, seq)[-1]
    go_on(engine, seq, len(PROMPT) + 30)
    engine.rewind(seq, len(PROMPT))
    engine.set_pending(seq, pending)
    assert engine.propose(seq) == guesses
    check_same(rows_of(engine, seq), state)


def test_a_shift_keeps_what_is_before_it(folder: Path) -> None:
    engine = open_drafting(folder)
    seq = begin(engine, tokens(7, 60))
    engine.shift(seq, 10, 20)
    engine.step(seq)
    engine.step(seq)
    assert mtp_of(engine).snapshot(seq, engine.tokens(seq)) is None, "rows behind it are of other tokens"


def test_without_room_it_guesses_nothing_and_the_target_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_drafting(folder)
    seq, other = begin(engine, tokens(7, 60)), begin(engine, tokens(8, 60))
    drafter = mtp_of(engine)

    def no_room(batch: Batch) -> Plan:
        raise NoSlot("no room")

    with monkeypatch.context() as patched:
        patched.setattr(drafter._memory, "plan", no_room)
        assert engine.propose(seq) == ()
        assert len(engine.step(other)) == 1
    engine.step(seq)
    engine.step(seq)
    assert engine.propose(seq), "it begins anew"
    assert drafter.snapshot(seq, engine.tokens(seq)) is None, "but what it has no rows of cannot be saved"


def test_one_sequence_gives_way_to_another(folder: Path) -> None:
    engine = open_drafting(folder, num_cells=100)
    drafter = mtp_of(engine)
    first = begin(engine, tokens(7, 90))
    engine.close(first)  # idle until its room is needed
    second = begin(engine, tokens(8, 90))
    assert len(engine.propose(second)) == 3
    assert drafter._memory.pos_max(first) is None


# -- states ------------------------------------------------------------------------------------------------


def test_a_resumed_sequence_goes_on_as_if_it_had_never_stopped(case: tuple[Oracle, Path]) -> None:
    _, folder = case
    engine = open_drafting(folder, deterministic=True)
    seq = begin(engine)
    go_on(engine, seq, len(PROMPT) + 9)
    state = engine.snapshot(seq)
    assert state.draft is not None
    expected = go_on(engine, seq, len(PROMPT) + COUNT)
    again = open_drafting(folder, deterministic=True)
    resumed = again.restore(state)
    assert go_on(again, resumed, len(PROMPT) + COUNT) == expected
    assert ids(again, resumed) == ids(engine, seq)
    check_same(rows_of(again, resumed), rows_of(engine, seq))


def test_a_state_is_of_rows_and_of_hidden_states(folder: Path) -> None:
    engine = open_drafting(folder)
    seq = begin(engine)
    state = rows_of(engine, seq)
    assert state.length == len(PROMPT) - 2
    assert [part.layer for part in parts_of(state.layout, PartKind.TOKEN)] == [3, 4]
    (hidden,) = parts_of(state.layout, PartKind.POINT)
    assert hidden.shape == (2, 64)
    oracle = oracle_of("deepseek_v3, depth 2")
    stored = state.points[-1].parts[0].view(torch.float32).view(2, 64)
    torch.testing.assert_close(stored, oracle.hidden(PROMPT)[-2:], atol=1e-4, rtol=0)


def test_a_state_since_some_token_has_the_rows_from_there(folder: Path) -> None:
    engine = open_drafting(folder)
    seq = begin(engine)
    drafter, fed = mtp_of(engine), engine.tokens(seq)
    state = drafter.snapshot(seq, fed, 15)
    assert state is not None
    assert [(run.start, run.stop) for run in state.rows] == [(15, 18)]
    late = drafter.snapshot(seq, fed, 19)
    assert late is not None
    assert late.rows == ()


@pytest.mark.parametrize("count", [1, 2])
def test_there_is_no_state_of_too_few_tokens(folder: Path, count: int) -> None:
    engine = open_drafting(folder)
    seq = begin(engine, PROMPT[:count])
    assert mtp_of(engine).snapshot(seq, engine.tokens(seq)) is None
    assert len(engine.propose(seq)) == 3


def test_places_are_those_before_a_cut_alone(folder: Path) -> None:
    engine = open_drafting(folder)
    seq = begin(engine)
    rows_of(engine, seq)
    go_on(engine, seq, len(PROMPT) + 12)
    assert [point.position for point in rows_of(engine, seq).points] == [18, engine.length(seq) - 2]
    engine.rewind(seq, 25)
    engine.set_pending(seq, 7)
    engine.step(seq)
    assert [point.position for point in rows_of(engine, seq).points] == [18, engine.length(seq) - 2]
    engine.rewind(seq, 19)
    engine.set_pending(seq, 7)
    engine.step(seq)
    assert [point.position for point in rows_of(engine, seq).points] == [engine.length(seq) - 2]


@pytest.mark.parametrize(("count", "made"), [(30, True), (60, False)])
def test_what_was_read_without_it_is_made_of_tokens_where_it_is_not_the_most(
    folder: Path, count: int, made: bool
) -> None:
    """Where it is, the draft is refused: one begins anew without, and says so."""
    drafting, plain = open_drafting(folder), open_drafting(folder, None)
    draft = drafting.snapshot(begin(drafting)).draft
    seq = plain.create(GREEDY)
    plain.feed(seq, [*PROMPT, *tokens(9, count - len(PROMPT))])
    state = replace(plain.snapshot(seq), draft=draft)
    if not made:
        with pytest.raises(StateError, match="read without"):
            drafting.restore(state)
        state = replace(state, draft=None)
    other = drafting.restore(state)
    assert drafting.propose(other) == ()
    drafting.step(other)
    drafting.step(other)
    assert drafting.propose(other)
    assert (mtp_of(drafting).snapshot(other, drafting.tokens(other)) is not None) is made


def test_a_state_without_its_draft_goes_on_and_guesses_soon(folder: Path) -> None:
    engine = open_drafting(folder)
    seq = begin(engine)
    state = replace(engine.snapshot(seq), draft=None)
    other = engine.restore(state)
    assert engine.propose(other) == ()
    engine.step(other)
    assert len(engine.propose(other)) == 3
    assert mtp_of(engine).snapshot(other, engine.tokens(other)) is None


def test_another_models_draft_is_refused_by_name(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    one = tmp_path_factory.mktemp("one")
    oracle_of("deepseek_v3, depth 1").write(one)
    engine, other = open_drafting(folder), open_drafting(one)
    state = rows_of(engine, begin(engine))
    with pytest.raises(FingerprintMismatch, match=r"mtp\.depths|weights|config"):
        mtp_of(other).restore(other.create(), PROMPT, state)


def other_points(state: DraftState, **changes: Any) -> DraftState:
    return replace(state, points=(replace(state.points[0], **changes),))


DAMAGES: dict[str, Callable[[DraftState], DraftState]] = {
    "no hidden states": lambda state: replace(state, points=()),
    "of another place": lambda state: other_points(state, position=state.length - 1),
    "no part": lambda state: other_points(state, parts=()),
    "too short": lambda state: other_points(state, parts=(state.points[0].parts[0][:-4],)),
    "no rows": lambda state: replace(state, rows=()),
    "rows of one depth": lambda state: replace(
        state, rows=(replace(state.rows[0], parts=state.rows[0].parts[:1]),)
    ),
    "rows from the second on": lambda state: replace(state, rows=(replace(state.rows[0], start=1),)),
    "more tokens than there are": lambda state: replace(state, length=len(PROMPT) - 1),
    "of other depths": lambda state: replace(state, ahead=1),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_not_whole_is_refused_and_nothing_is_known(folder: Path, damage: str) -> None:
    engine = open_drafting(folder)
    seq = begin(engine)
    state, drafter, other = rows_of(engine, seq), mtp_of(engine), engine.create()
    with pytest.raises(StateError):
        drafter.restore(other, PROMPT, DAMAGES[damage](state))
    assert other not in drafter._followed
    assert drafter._memory.pos_max(other) is None


def test_another_layout_is_refused(folder: Path) -> None:
    engine = open_drafting(folder)
    state = rows_of(engine, begin(engine))
    with pytest.raises(FingerprintMismatch, match="layout"):
        mtp_of(engine).restore(engine.create(), PROMPT, replace(state, layout=state.layout[:-1]))
