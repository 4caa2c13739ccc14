"""A state is a sequence, whole: taken in completely or not at all, and checked without a trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.errors import ContextFull, EditRefused, FingerprintMismatch, NoSlot, StateError, TenutoError
from engine.runner import Engine
from engine.state import (
    Canary,
    Fingerprint,
    NextLogits,
    PartKind,
    Pending,
    Provenance,
    Rows,
    SamplerParams,
    SeqId,
    SequenceState,
    Span,
)
from tests.engine.conftest import WINDOW, MakeEngine
from tests.engine.pictures import begun, bits, picture, said
from tests.tiny import write_tiny

PAST = [(7 * i) % 250 for i in range(120)]


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8_0"])
def test_a_restored_sequence_goes_on_bit_for_bit(
    dtype: str, windowed: bool, steps: int, make_engine: MakeEngine, tiny_path: Path, windowed_path: Path
) -> None:
    settings = {"path": windowed_path if windowed else tiny_path, "type_k": dtype, "type_v": dtype}
    engine, other = make_engine(**settings), make_engine(**settings)
    seq = begun(engine, PAST, steps=steps)
    engine.set_sampler(seq, SamplerParams(temperature=0.9, seed=4))
    state = engine.snapshot(seq)
    begun(other, [3] * 30)
    again = other.restore(state)
    assert picture(other, again) == picture(engine, seq)
    assert bits(other, again, 40) == bits(engine, seq, 40)


def test_a_snapshot_is_not_changed_by_what_follows(engine: Engine) -> None:
    seq = begun(engine, PAST)
    state = engine.snapshot(seq)
    rows = [part.clone() for run in state.rows for part in run.parts]
    said(engine, seq, 5)
    engine.rewind(seq, 50)
    engine.feed(seq, [1] * 100)
    assert all(
        torch.equal(a, b)
        for a, b in zip(rows, (part for run in state.rows for part in run.parts), strict=True)
    )
    assert state.tokens == tuple(PAST)


def test_a_state_goes_from_the_deterministic_mode_to_the_ordinary_and_back(make_engine: MakeEngine) -> None:
    """It means the same; how its last bits were made does not."""
    ordinary, exact = make_engine(), make_engine(deterministic=True)
    assert {**ordinary.fingerprint.making, "deterministic": True} == exact.fingerprint.making
    for one, other in ((ordinary, exact), (exact, ordinary)):
        seq = begun(one, PAST)
        canary = one.snapshot(seq).canary
        assert canary is not None
        assert (one.canary_drift(seq, canary) == 0) is (one is exact)
        assert other.canary_drift(other.restore(one.snapshot(seq)), canary) < 1e-3


def test_an_empty_sequence_has_a_state(engine: Engine) -> None:
    seq = engine.create(SamplerParams(seed=5))
    again = engine.restore(engine.snapshot(seq))
    assert picture(engine, again) == picture(engine, seq)
    assert engine.feed(again, PAST).computed == 120


def test_a_restored_past_is_a_known_prefix(make_engine: MakeEngine) -> None:
    engine, other = make_engine(), make_engine()
    other.restore(engine.snapshot(begun(engine, PAST)))
    assert other.known_prefix([*PAST, 1]) == 120


def _meaning(state: SequenceState, **changes: object) -> SequenceState:
    meaning = {**state.fingerprint.meaning, **changes}
    return dataclasses.replace(state, fingerprint=Fingerprint(meaning, state.fingerprint.making))  # type: ignore[arg-type]


WRONG: dict[str, tuple[Callable[[SequenceState], SequenceState], type[TenutoError]]] = {
    "other weights": (lambda state: _meaning(state, weights="other"), FingerprintMismatch),
    "other rope": (lambda state: _meaning(state, **{"rope.base": 1.0}), FingerprintMismatch),
    "a field too many": (lambda state: _meaning(state, lora="x"), FingerprintMismatch),
    "another layout": (
        lambda state: dataclasses.replace(state, layout=state.layout[:-1]),
        FingerprintMismatch,
    ),
    "an id beyond the vocabulary": (
        lambda state: dataclasses.replace(state, tokens=(260, *state.tokens[1:])),
        StateError,
    ),
    "a pending id beyond the vocabulary": (
        lambda state: dataclasses.replace(state, edge=Pending(-1)),
        StateError,
    ),
    "no edge": (lambda state: dataclasses.replace(state, edge=None), StateError),
    "logits of another size": (
        lambda state: dataclasses.replace(state, edge=NextLogits(torch.zeros(10))),
        StateError,
    ),
    "logits of another dtype": (
        lambda state: dataclasses.replace(state, edge=NextLogits(torch.zeros(260, dtype=torch.float64))),
        StateError,
    ),
    "no spans": (lambda state: dataclasses.replace(state, spans=()), StateError),
    "spans with a hole": (
        lambda state: dataclasses.replace(
            state, spans=(Span(0, 50, Provenance.COMPUTED), Span(60, 120, Provenance.COMPUTED))
        ),
        StateError,
    ),
    "spans beyond": (
        lambda state: dataclasses.replace(state, spans=(Span(0, 121, Provenance.COMPUTED),)),
        StateError,
    ),
    "no rows": (lambda state: dataclasses.replace(state, rows=()), StateError),
    "rows of fewer parts": (
        lambda state: dataclasses.replace(
            state, rows=tuple(dataclasses.replace(run, parts=run.parts[:-1]) for run in state.rows)
        ),
        StateError,
    ),
    "rows of other sizes": (
        lambda state: dataclasses.replace(
            state,
            rows=tuple(
                dataclasses.replace(run, parts=tuple(part[:, :-1] for part in run.parts))
                for run in state.rows
            ),
        ),
        StateError,
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_state_is_refused_and_leaves_nothing(wrong: str, make_engine: MakeEngine) -> None:
    damage, error = WRONG[wrong]
    engine, fresh = make_engine(num_seqs=2), make_engine(num_seqs=2)
    state = engine.snapshot(begun(engine, PAST))
    other = make_engine(num_seqs=2)
    live = begun(other, [9] * 20)
    before, free = picture(other, live), other._memory.free_cells()
    with pytest.raises(error):
        other.restore(damage(state))
    assert other._memory.free_cells() == free
    assert picture(other, live) == before
    assert other.known_prefix(PAST) == 0
    begun(fresh, [9] * 20)
    assert bits(other, begun(other, PAST), 5) == bits(fresh, begun(fresh, PAST), 5)


def test_the_field_that_differs_is_named(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    state = engine.snapshot(begun(engine, PAST))
    cases = {
        "rope.base": write_tiny(tmp_path / "rope.gguf", rope_base=500.0),
        "weights": write_tiny(tmp_path / "weights.gguf", seed=1),
        "tokenizer": write_tiny(tmp_path / "words.gguf", merged="he"),
    }
    for field, path in cases.items():
        with pytest.raises(FingerprintMismatch) as refused:
            make_engine(path).restore(state)
        named = str(refused.value.details["field"])
        assert named in (field, "rope.frequencies", "weights"), named
    with pytest.raises(FingerprintMismatch, match="type_v = bf16, this engine has f16"):
        make_engine(type_v="f16").restore(state)


def test_a_state_too_long_or_without_a_slot_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    state = engine.snapshot(begun(engine, PAST))
    short = make_engine(n_ctx=100, num_cells=1000)
    with pytest.raises(ContextFull):
        short.restore(state)
    full = make_engine(num_seqs=1)
    full.create()
    with pytest.raises(NoSlot):
        full.restore(state)
    crowded = make_engine(num_cells=200, n_ctx=200)
    live = begun(crowded, [3] * 150)
    before = picture(crowded, live)
    with pytest.raises(NoSlot):
        crowded.restore(state)
    assert picture(crowded, live) == before
    crowded.close(live)
    assert crowded.length(crowded.restore(state)) == 120, "an idle sequence gives way"


def test_a_canary_is_met_by_the_engine_that_made_it(engine: Engine) -> None:
    seq = begun(engine, PAST, steps=2)
    canary = engine.snapshot(seq).canary
    assert canary is not None
    assert canary.position == engine.length(seq) - 1
    assert engine.canary_drift(seq, canary) < 1e-4


def test_another_engines_canary_is_seen(engine: Engine) -> None:
    seq = begun(engine, PAST)
    canary = engine.snapshot(seq).canary
    assert canary is not None
    moved = dataclasses.replace(canary, logits=(*canary.logits[:-1], canary.logits[-1] + 0.5))
    assert engine.canary_drift(seq, moved) == pytest.approx(0.5, abs=1e-4)


@pytest.mark.parametrize("windowed", [False, True])
def test_a_canary_leaves_the_sequence_as_it_was(
    windowed: bool, make_engine: MakeEngine, tiny_path: Path, windowed_path: Path
) -> None:
    path = windowed_path if windowed else tiny_path
    engine, twin = make_engine(path), make_engine(path)
    seq, other = begun(engine, PAST, steps=2), begun(twin, PAST, steps=2)
    canary = engine.snapshot(seq).canary
    assert canary is not None
    before, free = picture(engine, seq), engine._memory.free_cells()
    engine.canary_drift(seq, canary)
    assert picture(engine, seq) == before
    assert engine._memory.free_cells() == free
    assert bits(engine, seq, 20) == bits(twin, other, 20)


def test_a_canary_works_while_every_sequence_is_in_use(make_engine: MakeEngine) -> None:
    engine = make_engine(num_seqs=1)
    seq = begun(engine, PAST)
    canary = engine.snapshot(seq).canary
    assert canary is not None
    assert engine.canary_drift(seq, canary) < 1e-4


def test_a_canary_of_another_position_is_refused(engine: Engine) -> None:
    seq = begun(engine, PAST)
    with pytest.raises(EditRefused, match="position 5"):
        engine.canary_drift(seq, Canary(5, (0,), (0.0,)))


def test_a_canary_goes_with_a_state_that_is_saved_again(engine: Engine, make_engine: MakeEngine) -> None:
    state = engine.snapshot(begun(engine, PAST, steps=1))
    assert isinstance(state.edge, Pending)
    other = make_engine()
    assert other.snapshot(other.restore(state)).canary == state.canary


def test_a_canary_can_be_asked_of_a_state_with_the_fewest_window_rows(
    make_engine: MakeEngine, windowed_path: Path
) -> None:
    engine, other = make_engine(windowed_path), make_engine(windowed_path)
    state = engine.snapshot(begun(engine, PAST, steps=3))
    assert state.canary is not None
    needed = state.length - WINDOW  # the canary's own token looks one further back
    rows = tuple(
        Rows(run.kind, needed, run.stop, tuple(part[needed - run.start :] for part in run.parts))
        if run.kind is PartKind.WINDOW
        else run
        for run in state.rows
    )
    seq = other.restore(dataclasses.replace(state, rows=rows))
    with pytest.raises(EditRefused):
        other.canary_drift(seq, state.canary)
    assert bits(other, seq, 10) == bits(engine, SeqId(0), 10)
