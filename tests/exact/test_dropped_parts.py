"""What is left out of a state is missed: for every part of every member, a restore without it goes on
otherwise. So no part is stored in vain, and the tests of exact resume would notice each of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.errors import NoCheckpoint
from engine.runner import Engine
from engine.state import PartKind, SequenceState, parts_of
from serialization.resume import can_resume_at
from serialization.snapshot import read_state
from sessions.manager import SessionManager
from sessions.stores.memory import MemoryStore
from tests.exact.members import MEMBERS, open_member
from tests.exact.running import STEPS, Live, forget, restored, run_live, step
from tests.oracles import base

#: between borders of windows, blocks and pools of every size in these models
CUTS = (23, 42, 61)


def emptied(state: SequenceState, kind: PartKind, index: int) -> SequenceState:
    """The state with zeros in place of one part's rows or point state."""

    def without(parts: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros_like(part) if i == index else part for i, part in enumerate(parts))

    if kind is PartKind.POINT:
        return replace(state, points=tuple(replace(p, parts=without(p.parts)) for p in state.points))
    runs = tuple(replace(run, parts=without(run.parts)) if run.kind is kind else run for run in state.rows)
    return replace(state, rows=runs)


@pytest.fixture(scope="module")
def lives() -> dict[str, tuple[SessionManager, Live]]:
    return {}


def live_run(family: str, lives: dict[str, tuple[SessionManager, Live]]) -> tuple[SessionManager, Live]:
    if family not in lives:
        manager = SessionManager(MemoryStore(), open_member(family, "f32"))
        lives[family] = manager, run_live(manager, base.tokens(7, max(CUTS) + STEPS), CUTS)
    return lives[family]


@pytest.mark.parametrize("family", list(MEMBERS))
def test_no_part_of_a_state_can_be_left_out(
    family: str, lives: dict[str, tuple[SessionManager, Live]]
) -> None:
    manager, live = live_run(family, lives)
    other = open_member(family, "f32")
    unmissed = [
        spec.name
        for kind in PartKind
        for index, spec in enumerate(parts_of(other.layout, kind))
        if not any(noticed(other, manager, live, cut, kind, index) for cut in CUTS)
    ]
    assert unmissed == []


def noticed(
    engine: Engine, manager: SessionManager, live: Live, cut: int, kind: PartKind, index: int
) -> bool:
    """Whether a sequence restored without one part says otherwise than the live run, within the steps."""
    seq = engine.restore(emptied(restored(engine, manager, live.saved[cut]), kind, index))
    try:
        ahead = range(cut, cut + STEPS)
        return any(not torch.equal(step(engine, seq, live.tokens[at]), live.logits[at]) for at in ahead)
    finally:
        forget(engine, seq)


@pytest.mark.parametrize("family", ["qwen4_exp"])
def test_token_ids_are_part_of_the_state_where_n_grams_are_read(
    family: str, lives: dict[str, tuple[SessionManager, Live]]
) -> None:
    manager, live = live_run(family, lives)
    other = open_member(family, "f32")
    for cut in CUTS:
        state = restored(other, manager, live.saved[cut])
        seq = other.restore(replace(state, tokens=(*state.tokens[:-1], (state.tokens[-1] + 1) % 256)))
        assert not torch.equal(step(other, seq, live.tokens[cut]), live.logits[cut])
        forget(other, seq)


RECURRENT = [member.family for member in MEMBERS.values() if member.kind in ("recurrent", "dsv4", "hybrid")]


@pytest.mark.parametrize("family", RECURRENT)
def test_a_checkpoint_that_is_left_out_cannot_be_resumed_and_says_so(
    family: str, lives: dict[str, tuple[SessionManager, Live]]
) -> None:
    manager, live = live_run(family, lives)
    manifest = live.saved[CUTS[-1]]
    assert all(can_resume_at(manifest, cut) for cut in CUTS)
    for dropped in CUTS:
        checkpoints = tuple(each for each in manifest.checkpoints if each.position != dropped)
        left = replace(manifest, checkpoints=checkpoints)
        assert [cut for cut in CUTS if not can_resume_at(left, cut)] == [dropped]
        with pytest.raises(NoCheckpoint, match=f"at {dropped} tokens"):
            read_state(manager.store, left, dropped)
