"""A second model that drafts: it reads what the target reads, and its part of a state comes back."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from engine.errors import ConfigError, FingerprintMismatch, StateError
from engine.runner import Engine
from engine.speculative.model_drafter import ModelDrafter
from engine.state import DraftState, SamplerParams, SeqId
from tests.engine.conftest import MakeEngine
from tests.exact.members import open_member
from tests.tiny import write_tiny

PROMPT = [7, 30, 31, 32, 7, 30, 31, 32, 9, 7]
GREEDY = SamplerParams()


@pytest.fixture(scope="module")
def other_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tokens, other weights."""
    return write_tiny(tmp_path_factory.mktemp("other") / "other.gguf", seed=3, layers=2)


def greedy(engine: Engine, tokens: list[int], count: int) -> list[int]:
    seq = engine.create()
    engine.feed(seq, tokens)
    said = [engine.decode([seq])[seq] for _ in range(count)]
    engine.rewind(seq, 0)
    engine.close(seq)
    return said


def drafting_pair(
    make_engine: MakeEngine, path: Path, **settings: object
) -> tuple[Engine, Engine, ModelDrafter]:
    """A target, the drafter's engine, and another one of the same model, undisturbed."""
    target = make_engine(deterministic=True)
    drafting, alone = (make_engine(path, deterministic=True, **settings) for _ in range(2))
    return target, alone, ModelDrafter(drafting, target)


def test_it_guesses_what_its_model_would_say(make_engine: MakeEngine, other_path: Path) -> None:
    _, alone, drafter = drafting_pair(make_engine, other_path)
    for tokens in (PROMPT, [*PROMPT, 5, 6], PROMPT[:4], [1, 2, 3], PROMPT):
        assert list(drafter.propose(SeqId(0), tokens, GREEDY, 5)) == greedy(alone, tokens, 5)


@pytest.mark.parametrize("family", ["mamba2", "gemma3", "qwen3_next", "deepseek_v4"])
def test_a_drafter_of_any_kind_comes_back_from_wrong_guesses(family: str) -> None:
    target, alone = (open_member(family, "f32", deterministic=True) for _ in range(2))
    drafter = ModelDrafter(open_member(family, "f32", deterministic=True), target)
    tokens = list(PROMPT)
    for turn in range(12):
        guesses = list(drafter.propose(SeqId(0), tokens, GREEDY, 4))
        assert guesses == greedy(alone, tokens, 4)
        tokens += [*guesses[: turn % 4], 11 + turn]


def test_sequences_are_kept_apart_and_may_be_more_than_it_has_room_for(
    make_engine: MakeEngine, other_path: Path
) -> None:
    _, alone, drafter = drafting_pair(make_engine, other_path, num_cells=64, num_seqs=2)
    texts = [[seq + 1, *PROMPT * 2] for seq in range(6)]
    for _ in range(2):
        for seq, tokens in enumerate(texts):
            guesses = list(drafter.propose(SeqId(seq), tokens, GREEDY, 3))
            if not guesses:  # the room was another's: it is free now
                guesses = list(drafter.propose(SeqId(seq), tokens, GREEDY, 3))
            assert guesses == greedy(alone, tokens, 3)


def test_where_its_context_is_full_it_guesses_nothing(make_engine: MakeEngine, other_path: Path) -> None:
    _, _, drafter = drafting_pair(make_engine, other_path, n_ctx=12)
    assert len(drafter.propose(SeqId(0), PROMPT, GREEDY, 5)) == 2
    assert drafter.propose(SeqId(0), [*PROMPT, 1, 2], GREEDY, 5) == ()


def test_a_model_with_other_tokens_cannot_draft(make_engine: MakeEngine, tmp_path: Path) -> None:
    stranger = make_engine(write_tiny(tmp_path / "stranger.gguf", merged="he"))
    with pytest.raises(ConfigError, match="tokenizer"):
        ModelDrafter(stranger, make_engine())


# -- its part of a state -------------------------------------------------------------------------------


def state_of(drafter: ModelDrafter, tokens: list[int]) -> DraftState:
    state = drafter.snapshot(SeqId(0), tokens)
    assert state is not None
    return state


def test_its_state_comes_back_bit_for_bit_and_reads_nothing_again(
    make_engine: MakeEngine, other_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, alone, drafter = drafting_pair(make_engine, other_path)
    drafter.propose(SeqId(0), PROMPT, GREEDY, 5)
    state = state_of(drafter, PROMPT[:-1])
    assert state.length == len(PROMPT) - 1, "guesses are no part of it"
    _, _, other = drafting_pair(make_engine, other_path)
    other.restore(SeqId(3), PROMPT[:-1], state)
    again = other.snapshot(SeqId(3), PROMPT[:-1])
    assert again is not None
    for mine, theirs in zip(state.rows, again.rows, strict=True):
        assert all(a.equal(b) for a, b in zip(mine.parts, theirs.parts, strict=True))
    monkeypatch.setattr(other._engine, "feed", lambda *_: pytest.fail("it was read already"))
    assert list(other.propose(SeqId(3), PROMPT, GREEDY, 5)) == greedy(alone, PROMPT, 5)


def test_what_the_target_took_back_is_no_part_of_its_state(make_engine: MakeEngine, other_path: Path) -> None:
    _, _, drafter = drafting_pair(make_engine, other_path)
    drafter.propose(SeqId(0), [*PROMPT, 1, 2, 3], GREEDY, 5)
    assert state_of(drafter, [*PROMPT[:6], 99]).length == 6
    assert drafter.snapshot(SeqId(0), [99]) is None
    assert drafter.snapshot(SeqId(1), PROMPT) is None, "of a sequence that it never saw it knows nothing"


def test_rows_since_a_position_are_all_that_a_later_save_needs(
    make_engine: MakeEngine, other_path: Path
) -> None:
    _, _, drafter = drafting_pair(make_engine, other_path)
    drafter.propose(SeqId(0), PROMPT, GREEDY, 5)
    late = drafter.snapshot(SeqId(0), PROMPT[:-1], 6)
    assert late is not None
    assert [(rows.start, rows.stop) for rows in late.rows] == [(6, 9)]
    beyond = drafter.snapshot(SeqId(0), PROMPT[:4], 6)
    assert beyond is not None
    assert beyond.length == 4
    assert all(rows.start == rows.stop for rows in beyond.rows)


def test_the_state_of_another_drafter_is_refused_and_nothing_is_lost(
    make_engine: MakeEngine, other_path: Path, tiny_path: Path
) -> None:
    _, alone, drafter = drafting_pair(make_engine, other_path)
    _, _, stranger = drafting_pair(make_engine, tiny_path)
    stranger.propose(SeqId(0), PROMPT, GREEDY, 2)
    with pytest.raises(FingerprintMismatch, match="layers"):
        drafter.restore(SeqId(0), PROMPT[:-1], state_of(stranger, PROMPT[:-1]))
    assert list(drafter.propose(SeqId(0), PROMPT, GREEDY, 2)) == greedy(alone, PROMPT, 2)


def test_target_and_draft_are_restored_together_or_not_at_all(
    make_engine: MakeEngine, other_path: Path
) -> None:
    target, _, drafter = drafting_pair(make_engine, other_path)
    target.speculate(drafter, 3)
    seq = target.create()
    target.feed(seq, PROMPT)
    for _ in range(3):
        target.step(seq)
    state = target.snapshot(seq)
    assert state.draft is not None
    other, _, again = drafting_pair(make_engine, other_path)
    assert other.draft_refusal(state.draft.fingerprint) == "no drafter is in use"
    other.speculate(again, 3)
    assert other.draft_refusal(state.draft.fingerprint) is None
    restored = other.restore(state)
    assert other.snapshot(restored).draft is not None
    assert [other.step(restored) for _ in range(4)] == [target.step(seq) for _ in range(4)]
    broken = dataclasses.replace(state, draft=dataclasses.replace(state.draft, rows=()))
    free = other._memory.free_cells()
    with pytest.raises(StateError):
        other.restore(broken)
    assert other._memory.free_cells() == free, "the target's rows are not there either"
