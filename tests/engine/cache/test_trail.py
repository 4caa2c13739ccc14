"""Trails: a sequence goes back into its last batch, as far as the state was kept, and no further."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.memory import View
from engine.cache.trail import newest_windows
from engine.errors import EditRefused, NoSlot
from engine.state import SeqId
from tests.engine.cache.harness import A, B, C, batch_of
from tests.engine.cache.members import WINDOW, Lines, compute, everything, member_spec, tiny_memory

POINT_KINDS = ("recurrent", "hybrid", "hybrid_iswa", "hybrid_idx", "dsv4")
kinds = pytest.mark.parametrize("kind", POINT_KINDS)
#: passes of a batch of 7 tokens: one, some that do not hold the tail of 4, and one for each token
passes = pytest.mark.parametrize("max_ubatch", [8, 3, 1])


def lines_of(kind: str, rollback: int = 3, **options: object) -> Lines:
    memory_spec = member_spec(kind, **{"max_ubatch": 8, "rollback": rollback, **options})  # type: ignore[arg-type]
    return Lines(memory_spec, tiny_memory(memory_spec))


def resumable(lines: Lines, seq: SeqId) -> list[int]:
    return [at for at in range(40) if lines.memory.can_resume_at(seq, at)]


@kinds
@passes
@pytest.mark.parametrize("back", range(4))
def test_a_sequence_is_cut_into_its_last_batch(kind: str, max_ubatch: int, back: int) -> None:
    lines = lines_of(kind, max_ubatch=max_ubatch)
    lines.feed((A, range(5)))
    lines.feed((A, range(50, 57)))
    assert resumable(lines, A) == [0, 9, 10, 11, 12]
    lines.cut(A, 12 - back)  # which looks at the state of every part, and at all rows
    lines.feed((A, range(100, 103)))


@kinds
@passes
def test_no_deeper_than_the_last_batch_wrote(kind: str, max_ubatch: int) -> None:
    """Not even to where it began."""
    lines = lines_of(kind, max_ubatch=max_ubatch)
    lines.feed((A, range(9)))
    lines.feed((A, range(20, 22)))
    assert resumable(lines, A) == [0, 10, 11]
    lines.feed((A, [30]))
    assert resumable(lines, A) == [0, 12]


@kinds
def test_a_refusal_says_what_there_is(kind: str) -> None:
    lines = lines_of(kind)
    lines.feed((A, range(4)))
    lines.memory.mark(A)
    lines.feed((A, range(4, 8)))
    lines.feed((A, range(8, 14)))
    before = everything(lines.memory)
    left = "there is no checkpoint, and the last batch left its states from 11 on; the nearest before is 4"
    with pytest.raises(EditRefused, match=f"sequence 0 cannot go on at 10: {left}"):
        lines.memory.remove(A, 10, None)
    with pytest.raises(EditRefused, match=f"sequence 0 cannot be copied up to 9: {left}"):
        lines.memory.copy(A, B, 0, 9)
    assert everything(lines.memory) == before
    assert [lines.memory.last_resumable(A, at) for at in (3, 10, 11, 13, 14)] == [0, 4, 11, 13, 14]
    lines.feed((A, [99]))
    with pytest.raises(EditRefused, match="at 14: there is no checkpoint; the nearest before is 4"):
        lines.memory.remove(A, 14, None)


@kinds
def test_the_states_that_are_older_stay_and_the_later_ones_go(kind: str) -> None:
    lines = lines_of(kind)
    lines.feed((A, range(8)))
    lines.cut(A, 7)
    assert resumable(lines, A) == [0, 5, 6, 7]
    assert lines.memory._trails.positions(A) == range(5, 7)
    lines.cut(A, 5)
    assert resumable(lines, A) == [0, 5]
    assert not lines.memory._trails._by_seq[A].runs, "nothing is kept that nobody can go back to"
    lines.cut(A, 0)
    lines.feed((A, [1]))
    assert resumable(lines, A) == [0, 1]


@kinds
def test_nothing_is_applied_twice(kind: str) -> None:
    lines = lines_of(kind)
    lines.feed((A, range(8)))
    lines.cut(A, 6)
    before = everything(lines.memory)
    lines.cut(A, 6)
    lines.cut(A, 99)
    assert everything(lines.memory) == before
    lines.cut(A, 5)
    lines.feed((A, range(100, 102)))


@kinds
@pytest.mark.parametrize("applied", range(4))
def test_a_plan_that_is_rolled_back_leaves_the_trail_as_it_was(kind: str, applied: int) -> None:
    lines = lines_of(kind, max_ubatch=2)
    lines.feed((A, range(6)))
    before = everything(lines.memory)
    plan = lines.memory.plan(batch_of((A, 6, range(100, 105)), (B, 0, range(200, 203))))
    for index, ubatch in enumerate(plan.ubatches[:applied]):
        compute(lines.spec, ubatch, plan.apply(index))
    plan.rollback()
    assert everything(lines.memory) == before
    lines.cut(A, 3)
    lines.feed((A, range(300, 304)))


@kinds
def test_sequences_have_trails_of_their_own(kind: str) -> None:
    lines = lines_of(kind)
    lines.feed((A, range(6)), (B, range(50, 53)))
    lines.feed((C, range(80, 84)), (B, [60]))
    assert [resumable(lines, seq) for seq in (A, B, C)] == [[0, 3, 4, 5, 6], [0, 4], [0, 1, 2, 3, 4]]
    lines.cut(C, 2)
    lines.cut(A, 4)
    lines.feed((A, [7]), (B, [8]), (C, [9]))


@kinds
def test_who_is_asked_for_more_beside_another_keeps_no_more(kind: str) -> None:
    """Two tokens of each go in side by side: of B both states are wanted, of A the second."""
    lines = lines_of(kind, rollback=5, max_ubatch=4)
    lines.feed((A, range(7)), (B, range(50, 52)))
    assert resumable(lines, A) == [0, 2, 3, 4, 5, 6, 7]
    assert resumable(lines, B) == [0, 1, 2]
    lines.cut(A, 2)
    lines.feed((A, range(80, 83)))


@pytest.mark.parametrize("kind", ["iswa", "hybrid_iswa", "dsv4"])
def test_no_batch_takes_a_window_row_that_going_back_into_it_needs(kind: str) -> None:
    """Not where its cells are all that there are: one that would is refused as a whole."""
    memory_spec = member_spec(kind, rollback=3, max_batch=8)
    lines = Lines(memory_spec, tiny_memory(memory_spec, window_cells=WINDOW + 4))
    for start in range(0, 40, 4):
        lines.feed((A, range(start, start + 4)))
        lines.cut(A, len(lines.tokens[A]) - 3)
        lines.feed((A, range(100 + start, 104 + start)))
        before = everything(lines.memory)
        if start:
            with pytest.raises(NoSlot):
                lines.memory.plan(batch_of((A, len(lines.tokens[A]), range(5))))
        assert everything(lines.memory) == before
        lines.cut(A, len(lines.tokens[A]) - 2)


@kinds
def test_a_fork_carries_the_trail_and_each_goes_its_own_way(kind: str) -> None:
    lines = lines_of(kind)
    lines.feed((B, range(50, 57)))
    lines.feed((A, range(8)))
    lines.copy(A, B)
    lines.copy(A, C, 6)
    assert resumable(lines, B) == [0, 5, 6, 7, 8]
    assert resumable(lines, C) == [0, 5, 6]
    assert lines.memory._trails.positions(C) == range(5, 6)
    lines.cut(A, 0)
    lines.cut(B, 7)
    lines.cut(C, 5)
    lines.feed((A, range(90, 93)), (B, [91]), (C, range(92, 95)))
    lines.copy(A, B, 0)
    assert resumable(lines, B) == [0]


@kinds
def test_who_is_not_kept_leaves_no_trail_behind(kind: str) -> None:
    lines = lines_of(kind)
    lines.feed((A, range(6)), (B, range(50, 56)))
    lines.memory.keep(B)
    lines.tokens[A] = []
    assert not lines.memory._trails.positions(A)
    lines.feed((A, [1]))
    assert resumable(lines, A) == [0, 1]
    assert resumable(lines, B) == [0, 3, 4, 5, 6]


@kinds
def test_a_trail_is_not_saved_and_gone_after_a_restore(kind: str) -> None:
    lines = lines_of(kind)
    lines.feed((A, range(4)))
    lines.memory.mark(A)
    lines.feed((A, range(4, 9)))
    rows, points = lines.memory.snapshot(A)
    assert [point.position for point in points] == [4, 9]
    lines.feed((B, range(50, 59)))
    lines.cut(B, 0)
    lines.memory.restore(B, tuple(range(9)), rows, points)
    lines.tokens[B] = list(range(9))
    lines.check()
    assert resumable(lines, B) == [0, 4, 9]
    with pytest.raises(EditRefused, match="at 8: there is no checkpoint; the nearest before is 4"):
        lines.memory.remove(B, 8, None)
    lines.feed((B, range(100, 103)))
    assert resumable(lines, B) == [0, 4, 9, 10, 11, 12]


@kinds
def test_a_place_that_was_gone_back_to_can_be_marked(kind: str) -> None:
    lines = lines_of(kind)
    lines.feed((A, range(8)))
    lines.cut(A, 6)
    lines.memory.mark(A)
    lines.feed((A, range(100, 105)))
    lines.feed((A, [7]))
    lines.cut(A, 6)
    lines.feed((A, range(200, 203)))


@kinds
@settings(max_examples=15)
@given(
    first=st.integers(1, 9), drafted=st.integers(0, 5), accepted=st.integers(0, 5), rounds=st.integers(1, 4)
)
def test_drafts_are_rolled_back_over_and_over(
    kind: str, first: int, drafted: int, accepted: int, rounds: int
) -> None:
    lines = lines_of(kind, rollback=5)
    lines.feed((A, range(first)))
    for round_ in range(rounds):
        length = len(lines.tokens[A])
        lines.feed((A, range(1000 * round_ + 100, 1000 * round_ + 101 + drafted)))
        lines.cut(A, length + 1 + min(accepted, drafted))


# -- what passes are asked for ---------------------------------------------------------------------


def asked(rollback: int, max_ubatch: int, *counts: int) -> list[tuple[int, int]]:
    """Tokens of each segment and states asked for, pass by pass."""
    lines = lines_of("recurrent", rollback, max_ubatch=max_ubatch)
    plan = lines.memory.plan(batch_of(*((SeqId(seq), 0, range(n)) for seq, n in enumerate(counts))))
    found = []
    for index, ubatch in enumerate(plan.ubatches):
        view: View = plan.apply(index)
        compute(lines.spec, ubatch, view)
        found.append((view.segments[0].stop - view.segments[0].start, view.newest))
    plan.commit()
    return found


def test_passes_are_asked_for_no_more_than_a_trail_takes() -> None:
    assert asked(0, 8, 20) == [(8, 1), (8, 1), (4, 1)]
    assert asked(3, 8, 20) == [(8, 1), (8, 1), (4, 4)]
    assert asked(3, 8, 1) == [(1, 1)]
    assert asked(3, 8, 2) == [(2, 2)]
    assert asked(3, 8, 4, 4) == [(4, 4)]
    # The tail is never divided where a pass can hold it, ...
    assert asked(3, 8, 17) == [(8, 1), (5, 1), (4, 4)]
    # ... and where none can, the passes before give what is missing.
    assert asked(3, 2, 7) == [(2, 1), (2, 1), (2, 2), (1, 1)]
    assert asked(5, 1, 3) == [(1, 1)] * 3


@kinds
def test_nothing_is_kept_where_nothing_is_asked_for(kind: str) -> None:
    lines = lines_of(kind, rollback=0)
    lines.feed((A, range(6)))
    lines.feed((A, [7]))
    assert not lines.memory._trails.positions(A)
    assert resumable(lines, A) == [0, 7]


@kinds
@passes
def test_a_trail_has_the_bytes_of_its_states_and_hardly_more(kind: str, max_ubatch: int) -> None:
    lines = lines_of(kind, max_ubatch=max_ubatch)
    for start in range(0, 60, 20):
        lines.feed((A, range(start, start + 20)), (B, range(start, start + 6)))
    live = sum(part.buffer.read_bytes(A).numel() for part in lines.memory._parts.points.values())
    for seq in (A, B):
        runs = lines.memory._trails._by_seq[seq].runs
        kept = {t.untyped_storage().data_ptr(): t for run in runs for t in run.states.values()}
        assert sum(t.untyped_storage().nbytes() for t in kept.values()) <= 4 * live


# -- windows of a line -----------------------------------------------------------------------------


@given(before=st.integers(0, 3), size=st.integers(1, 6), newest=st.integers(1, 5), segments=st.integers(1, 3))
def test_windows_are_what_each_of_the_last_rows_leaves(
    before: int, size: int, newest: int, segments: int
) -> None:
    rows = before + size + newest
    line = torch.arange(float(segments * rows * 2)).view(segments, rows, 2)
    windows = newest_windows(line, size, newest)
    assert windows.shape == (segments, newest, size, 2)
    for back in range(newest):
        stop = rows - back
        assert torch.equal(windows[:, newest - 1 - back], line[:, stop - size : stop])


def test_windows_of_a_long_line_keep_its_end_alone() -> None:
    line = torch.zeros(1, 500, 4)
    windows = newest_windows(line, 3, 4)
    assert windows.untyped_storage().nbytes() == (3 + 4 - 1) * 4 * 4
    lone = newest_windows(line, 3, 1)
    assert lone.untyped_storage().data_ptr() == line.untyped_storage().data_ptr(), "a view: no copy"
