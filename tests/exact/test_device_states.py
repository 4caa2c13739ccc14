"""Copies on the device, for every member of the family: gone back to bit for bit, wherever rows then lie."""

from __future__ import annotations

import pytest
import torch

from engine.state import PartKind, SequenceState, parts_of
from tests.exact.members import MEMBERS, OTHERS, open_member
from tests.exact.running import STEPS, first_difference, go_on
from tests.exact.test_scenarios import shuffle_cells
from tests.oracles import base

PAST = base.tokens(5, 90)
NEXT = base.tokens(6, STEPS)

CASES = [
    pytest.param(family, dtype, marks=() if dtype == member.dtypes[-1] else pytest.mark.slow)
    for family, member in MEMBERS.items()
    for dtype in member.dtypes
]


@pytest.mark.parametrize(("family", "dtype"), CASES)
@pytest.mark.parametrize("cut", [7, pytest.param(33, marks=pytest.mark.slow), 90])
def test_what_comes_back_goes_on_as_it_did(
    family: str, dtype: str, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_member(family, dtype, checkpoint_every=16)
    seq, beside = engine.create(), engine.create()
    for start in range(0, cut, 9):
        engine.feed(seq, PAST[start : min(start + 9, cut)])
        engine.feed(beside, PAST[start + 1 : start + 3])
    handle, state = engine.device_snapshot(seq), engine.snapshot(seq)
    live = go_on(engine, seq, NEXT)
    engine.device_restore(handle, seq)
    assert_same(engine.snapshot(seq), state)
    assert first_difference(go_on(engine, seq, NEXT), live) is None
    with monkeypatch.context() as patched:
        shuffle_cells(patched)  # from now on no two rows are beside each other
        engine.device_restore(handle, beside)
        assert_same(engine.snapshot(beside), state)
        assert first_difference(go_on(engine, beside, NEXT), live) is None
    again = engine.device_restore(handle)
    assert first_difference(go_on(engine, again, NEXT), live) is None


def assert_same(state: SequenceState, before: SequenceState) -> None:
    """Equal in every byte; but of the window rows that a memory happens to have beyond those that are needed,
    one that was restored may keep fewer."""
    assert (state.tokens, state.spans, state.sampler, state.canary) == (
        before.tokens,
        before.spans,
        before.sampler,
        before.canary,
    )
    for kind in (PartKind.TOKEN, PartKind.BLOCK, PartKind.WINDOW):
        for run, whole in zip(state.rows_of(kind), before.rows_of(kind), strict=True):
            assert run.stop == whole.stop
            assert run.start == whole.start or kind is PartKind.WINDOW
            for part, rows in zip(run.parts, whole.parts, strict=True):
                assert torch.equal(part, rows[len(rows) - len(part) :])
    assert [point.position for point in state.points] == [point.position for point in before.points]
    for point, old in zip(state.points, before.points, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(point.parts, old.parts, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_every_other_architecture_comes_back_too(family: str) -> None:
    engine = open_member(family, "bf16")
    seq = engine.create()
    engine.feed(seq, PAST[:50])
    handle = engine.device_snapshot(seq)
    live = go_on(engine, seq, NEXT)
    engine.device_restore(handle, seq)
    assert first_difference(go_on(engine, seq, NEXT), live) is None
    assert first_difference(go_on(engine, engine.device_restore(handle), NEXT), live) is None


@pytest.mark.parametrize("family", MEMBERS)
def test_checkpoints_come_back_with_the_rest(family: str) -> None:
    engine = open_member(family, "bf16", checkpoint_every=16)
    seq = engine.create()
    engine.feed(seq, PAST[:50])
    places = [at for at in range(51) if engine.can_resume_at(seq, at)]
    handle = engine.device_snapshot(seq)
    engine.rewind(seq, 0)
    engine.device_restore(handle, seq)
    assert [at for at in range(51) if engine.can_resume_at(seq, at)] == places
    if parts_of(engine.layout, PartKind.POINT):
        assert places == [0, 16, 32, 48, 50]
