"""Point state is true at one position: undone, forked, cut back to checkpoints, and never guessed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.parts_memory import PartsMemory
from engine.cache.points import Checkpoints, Frozen
from engine.errors import EditRefused, StateError
from engine.state import Point, SeqId, least_missed
from tests.engine.cache.harness import A, B, C, batch_of
from tests.engine.cache.members import (
    Lines,
    compute,
    everything,
    feed,
    member_spec,
    state_after,
    tiny_memory,
)

POINT_KINDS = ("recurrent", "hybrid", "hybrid_iswa", "hybrid_idx", "dsv4")
kinds = pytest.mark.parametrize("kind", POINT_KINDS)


def lines_of(kind: str, **options: object) -> Lines:
    memory_spec = member_spec(kind, **{"max_ubatch": 8, **options})  # type: ignore[arg-type]
    return Lines(memory_spec, tiny_memory(memory_spec))


def is_zero(memory: PartsMemory, seq: SeqId) -> bool:
    return not any(part.buffer.read([seq]).any() for part in memory._parts.points.values())


@kinds
def test_before_the_first_token_there_are_zeros(kind: str) -> None:
    lines = lines_of(kind)
    memory = lines.memory
    lines.feed((A, range(5)), (B, range(50, 53)))
    assert not is_zero(memory, A)
    assert is_zero(memory, C)
    lines.cut(A, 0)
    assert is_zero(memory, A)
    lines.feed((A, range(100, 107)))
    lines.copy(C, A)  # of nothing
    assert is_zero(memory, A)
    lines.feed((C, range(200, 202)))
    memory.keep(C)
    lines.tokens[:2] = [[], []]
    lines.check()
    assert is_zero(memory, B)
    lines.feed((B, range(300, 305)), (A, [7]))


@kinds
def test_sequences_go_side_by_side(kind: str) -> None:
    lines = lines_of(kind, keep_tail=2)
    for start in range(0, 18, 6):
        lines.feed((A, range(start, start + 6)), (B, range(100 + start, 104 + start)), (C, [200 + start]))
    plan = lines.memory.plan(batch_of((A, 18, range(9)), (B, 12, range(3))))
    for index, ubatch in enumerate(plan.ubatches):
        view = plan.apply(index)
        assert len({segment.stop - segment.start for segment in view.segments}) == 1
        assert view.point(*next(iter(lines.memory._parts.points))).shape[0] == len(view.segments)
        assert len(ubatch) <= 8
    plan.rollback()


@kinds
@pytest.mark.parametrize("applied", range(3))
def test_a_rollback_brings_the_state_back(kind: str, applied: int) -> None:
    memory_spec = member_spec(kind, max_ubatch=4)
    memory = tiny_memory(memory_spec)
    feed(memory_spec, memory, (A, range(7)))
    memory.mark(A)
    before = everything(memory)
    plan = memory.plan(batch_of((A, 7, range(100, 108)), (B, 0, range(200, 204))))
    for index, ubatch in enumerate(plan.ubatches[:applied]):
        compute(memory_spec, ubatch, plan.apply(index))
    plan.rollback()
    assert everything(memory) == before


@kinds
def test_a_state_is_replaced_and_never_written_to(kind: str) -> None:
    """Checkpoints, forks and what a plan would undo hold the same tensors as the live state."""
    lines = lines_of(kind)
    lines.feed((A, range(7)))
    buffers = [part.buffer for part in lines.memory._parts.points.values()]
    held = [buffer.read([A]) for buffer in buffers]
    copies = [tensor.clone() for tensor in held]
    lines.feed((A, range(100, 103)))
    lines.cut(A, 0)
    lines.feed((A, range(200, 205)))
    assert all(torch.equal(*pair) for pair in zip(held, copies, strict=True))


@kinds
def test_a_state_keeps_nothing_alive_but_itself(kind: str) -> None:
    lines = lines_of(kind)
    lines.feed((A, range(7)), (B, range(50, 57)))
    for part in lines.memory._parts.points.values():
        row = part.buffer.read([A])
        assert row.untyped_storage().nbytes() == row.nbytes


@kinds
def test_forks_have_a_state_of_their_own(kind: str) -> None:
    lines = lines_of(kind)
    lines.feed((A, range(7)))
    lines.copy(A, B)
    lines.feed((A, range(100, 103)), (B, range(200, 205)))
    lines.memory.mark(A)
    lines.feed((A, range(300, 305)))
    lines.copy(A, C, 10)
    lines.copy(A, B, 0)
    lines.feed((C, range(400, 405)), (B, [1]))


@kinds
def test_a_sequence_goes_back_to_checkpoints_alone(kind: str) -> None:
    lines = lines_of(kind)
    memory = lines.memory
    for start in range(0, 16, 4):
        lines.feed((A, range(start, start + 4)))
        if start < 8:
            memory.mark(A)
    can = [at for at in range(17) if memory.can_resume_at(A, at)]
    assert can == [0, 4, 8, 16]
    assert [memory.last_resumable(A, at) for at in (0, 3, 4, 7, 8, 15, 16, 99)] == [0, 0, 4, 4, 8, 8, 16, 16]
    before = everything(memory)
    with pytest.raises(
        EditRefused, match="cannot go on at 11: there is no checkpoint; the nearest before is 8"
    ):
        memory.remove(A, 11, None)
    with pytest.raises(EditRefused, match="copied up to 3: there is no checkpoint; the nearest before is 0"):
        memory.copy(A, B, 0, 3)
    for verb in (
        lambda: memory.remove(A, 2, 5),
        lambda: memory.copy(A, B, 4),
        lambda: memory.shift(A, 8, None, 3),
        lambda: memory.divide(A, 0, None, 2),
        lambda: memory.discard(A, 0, 4),
    ):
        with pytest.raises(EditRefused, match="recurrent state"):
            verb()
    assert everything(memory) == before
    lines.cut(A, 8)
    lines.feed((A, range(100, 109)))
    assert [at for at in range(18) if memory.can_resume_at(A, at)] == [0, 4, 8, 17]
    lines.cut(A, 4)
    assert [at for at in range(18) if memory.can_resume_at(A, at)] == [0, 4]
    lines.cut(A, 0)
    assert memory.last_resumable(A, 99) == 0
    assert memory._checkpoints.nbytes() == 0


@kinds
def test_a_checkpoint_of_what_was_before_is_none_of_what_came_instead(kind: str) -> None:
    lines = lines_of(kind)
    lines.feed((A, range(4)))
    lines.memory.mark(A)
    lines.feed((A, range(4, 8)))
    lines.memory.mark(A)
    lines.cut(A, 4)
    lines.feed((A, range(100, 108)))
    assert not lines.memory.can_resume_at(A, 8)
    lines.copy(B, A)
    lines.feed((A, range(200, 208)))
    assert [at for at in range(9) if lines.memory.can_resume_at(A, at)] == [0, 8]


def test_who_is_not_kept_leaves_no_checkpoint_behind() -> None:
    lines = lines_of("hybrid")
    lines.feed((A, range(4)), (B, range(100, 103)))
    lines.memory.mark(A)
    lines.memory.keep(B)
    lines.tokens[A] = []
    lines.feed((A, range(200, 207)))
    assert [at for at in range(8) if lines.memory.can_resume_at(A, at)] == [0, 7]
    assert lines.memory._checkpoints.nbytes() == 0


def test_windows_and_point_state_must_both_be_there() -> None:
    memory_spec = member_spec("hybrid_iswa", max_batch=4)
    lines = Lines(memory_spec, tiny_memory(memory_spec, window_cells=9))
    for start in range(0, 20, 4):
        lines.feed((A, range(start, start + 4)))
        lines.memory.mark(A)
    held = lines.memory._tables.windowed
    assert held is not None
    assert held.held_range(A) == (11, 20)
    assert [at for at in range(21) if lines.memory.can_resume_at(A, at)] == [0, 16, 20]
    assert lines.memory.last_resumable(A, 15) == 0
    with pytest.raises(EditRefused, match="window rows are gone"):
        lines.memory.remove(A, 12, None)


def test_nothing_is_marked_where_there_is_nothing_to_remember() -> None:
    lines = lines_of("hybrid")
    lines.memory.mark(A)
    assert lines.memory._checkpoints.positions(A) == ()
    lines = lines_of("kv")
    lines.feed((A, range(3)))
    lines.memory.mark(A)
    assert lines.memory._checkpoints.positions(A) == ()
    assert lines.memory.snapshot(A)[1] == ()


# -- states ----------------------------------------------------------------------------------------


@kinds
def test_checkpoints_are_saved_and_come_back(kind: str) -> None:
    lines = lines_of(kind, full_windows=kind in ("hybrid_iswa", "dsv4"))
    for start in range(0, 16, 4):
        lines.feed((A, range(start, start + 4)))
        lines.memory.mark(A)
    rows, points = lines.memory.snapshot(A)
    assert [point.position for point in points] == [4, 8, 12, 16]
    assert [point.position for point in lines.memory.snapshot(A, 8)[1]] == [12, 16]
    assert [point.position for point in lines.memory.snapshot(A, 16)[1]] == [16]
    other = lines_of(kind, full_windows=kind in ("hybrid_iswa", "dsv4"))
    other.memory.restore(C, tuple(range(16)), rows, points)
    other.tokens[C] = list(range(16))
    other.check()
    assert [at for at in range(17) if other.memory.can_resume_at(C, at)] == [0, 4, 8, 12, 16]
    other.cut(C, 8)
    other.feed((C, range(100, 107)))


@kinds
def test_an_empty_sequence_has_an_empty_state(kind: str) -> None:
    memory = lines_of(kind).memory
    assert memory.snapshot(A) == ((), ())
    memory.restore(A, (), (), ())
    assert is_zero(memory, A)


@kinds
def test_bytes_of_any_alignment_can_be_restored(kind: str) -> None:
    lines = lines_of(kind)
    lines.feed((A, range(5)))
    rows, (point,) = lines.memory.snapshot(A)
    crooked = []
    for part in point.parts:
        wide = torch.zeros(part.numel() + 3, dtype=torch.uint8)
        wide[3:] = part
        crooked.append(wide[3:])
    lines.memory.restore(B, tuple(range(5)), rows, (Point(5, tuple(crooked)),))
    lines.tokens[B] = list(range(5))
    lines.check()


@kinds
def test_point_state_that_is_not_whole_is_refused_and_changes_nothing(kind: str) -> None:
    lines = lines_of(kind)
    lines.feed((A, range(5)))
    lines.memory.mark(A)
    lines.feed((A, range(5, 9)))
    rows, (early, last) = lines.memory.snapshot(A)
    before = everything(lines.memory)
    ids = tuple(range(9))
    short = replace(last, parts=(last.parts[0][:-4], *last.parts[1:]))
    wide = replace(last, parts=(last.parts[0].view(torch.float32), *last.parts[1:]))
    bad: list[tuple[str, tuple[Point, ...]]] = [
        ("9 tokens, and no point state at their end", (early,)),
        ("9 tokens, and no point state at their end", ()),
        ("point state at 5 of 9 tokens, behind that at 9", (last, early)),
        ("point state at 5 of 9 tokens, behind that at 5", (early, early, last)),
        ("point state at 10 of 9 tokens", (early, last, replace(last, position=10))),
        ("point state at 0 of 9 tokens", (replace(early, position=0), last)),
        (r"part \w+.\w+.\d\d: torch.uint8", (short,)),
        (r"part \w+.\w+.\d\d: torch.float32", (wide,)),
        ("point state has 0 parts", (early, replace(last, parts=()))),
    ]
    for message, points in bad:
        with pytest.raises(StateError, match=message):
            lines.memory.restore(B, ids, rows, points)
        assert everything(lines.memory) == before
    lines.memory.restore(B, ids, rows, (early, last))


@pytest.mark.parametrize("broken", ["rows", "points"])
@kinds
def test_a_restore_that_breaks_off_leaves_the_sequence_empty(
    kind: str, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = lines_of(kind)
    lines.feed((A, range(9)))
    state = lines.memory.snapshot(A)
    before = everything(lines.memory)
    parts = lines.memory._parts
    if broken == "rows" and not parts.stored:
        return
    last = parts.stored[-1] if broken == "rows" else list(parts.points.values())[-1]

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(last.buffer, "write_bytes", fail)
        with pytest.raises(MemoryError):
            lines.memory.restore(B, tuple(range(9)), *state)
    assert everything(lines.memory) == before
    lines.feed((B, range(300, 305)))


# -- the budget ------------------------------------------------------------------------------------


def frozen(nbytes: int = 10) -> Frozen:
    return (torch.zeros(nbytes - 4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8))


def filled(budget: int, *positions: tuple[SeqId, int]) -> Checkpoints:
    checkpoints = Checkpoints(3, budget)
    for seq, position in positions:
        checkpoints.add(seq, position, frozen())
    return checkpoints


def test_checkpoints_beyond_the_budget_go_the_least_missed_first() -> None:
    checkpoints = filled(30, (A, 10), (A, 20), (A, 21))
    assert checkpoints.positions(A) == (10, 20, 21)
    checkpoints.add(A, 40, frozen())
    # Without 20, one place has ten tokens more to read; without 21, nineteen have one more.
    assert checkpoints.positions(A) == (10, 21, 40)
    assert checkpoints.nbytes() == 30


def test_the_sequence_that_has_most_gives() -> None:
    checkpoints = filled(40, (A, 100), (B, 5), (B, 6), (B, 50))
    checkpoints.add(C, 3, frozen())
    assert [checkpoints.positions(seq) for seq in (A, B, C)] == [(100,), (6, 50), (3,)]


def test_the_new_one_stays_where_others_can_go() -> None:
    checkpoints = filled(10, (B, 7))
    checkpoints.add(A, 3, frozen())
    assert [checkpoints.positions(seq) for seq in (A, B)] == [(3,), ()]
    checkpoints.add(A, 9, frozen(11))
    assert checkpoints.nbytes() == 0
    assert filled(0, (A, 3)).positions(A) == ()


def test_what_forks_share_is_counted_once_and_goes_from_all_of_them() -> None:
    checkpoints = filled(30, (A, 10), (A, 20), (A, 30))
    checkpoints.copy(A, B, 20)
    checkpoints.copy(B, C, 99)
    assert [checkpoints.positions(seq) for seq in (A, B, C)] == [(10, 20, 30), (10, 20), (10, 20)]
    assert checkpoints.nbytes() == 30
    checkpoints.cut(A, 0)
    assert checkpoints.nbytes() == 20
    assert checkpoints.at(B, 20) is checkpoints.at(C, 20)
    checkpoints.add(B, 21, frozen())
    checkpoints.add(B, 22, frozen())
    assert checkpoints.nbytes() == 30
    assert [checkpoints.positions(seq) for seq in (B, C)] == [(10, 21, 22), (10,)]
    checkpoints.add(B, 90, frozen())
    assert [checkpoints.positions(seq) for seq in (B, C)] == [(10, 22, 90), (10,)]


def test_a_memory_keeps_to_its_budget() -> None:
    memory_spec = member_spec("hybrid", checkpoint_bytes=3 * 24)
    memory = tiny_memory(memory_spec)
    for start in range(0, 30, 3):
        feed(memory_spec, memory, (A, range(start, start + 3)))
        memory.mark(A)
        assert memory._checkpoints.nbytes() == min(24 * (start // 3 + 1), 72)
        assert memory.can_resume_at(A, start + 3)
    kept = [at for at in range(1, 31) if memory.can_resume_at(A, at)]
    assert len(kept) == 3
    memory.remove(A, kept[1], None)
    need = next(iter(memory._parts.points.values()))
    assert torch.equal(need.buffer.read([A])[0], state_after(need.need, range(kept[1])))


@given(positions=st.sets(st.integers(1, 60), min_size=2, max_size=8))
def test_the_least_missed_is_the_one_whose_loss_costs_the_fewest_tokens(positions: set[int]) -> None:
    rising = sorted(positions)
    last = rising[-1]

    def to_read(kept: list[int]) -> int:
        """Tokens to read again, over all places to go back to."""
        return sum(place - max(at for at in (0, *kept) if at <= place) for place in range(last + 1))

    others = rising[:-2] or rising[:1]  # the last two go last
    losses = [to_read([at for at in rising if at != gone]) for gone in others]
    assert least_missed(rising) == losses.index(min(losses))


def test_the_state_before_a_plan_is_kept_once_however_many_passes_it_has() -> None:
    memory_spec = member_spec("recurrent", max_ubatch=1)
    memory = tiny_memory(memory_spec)
    plan = memory.plan(batch_of((A, 0, range(8))))
    for index, ubatch in enumerate(plan.ubatches):
        compute(memory_spec, ubatch, plan.apply(index))
    assert len(plan._undo.points) == len(memory._parts.points)
    plan.rollback()
    assert is_zero(memory, A)


@kinds
def test_a_restored_sequence_goes_back_to_where_it_was_restored(kind: str) -> None:
    lines = lines_of(kind)
    lines.feed((A, range(9)))
    state = lines.memory.snapshot(A)
    lines.memory.restore(B, tuple(range(9)), *state)
    lines.tokens[B] = list(range(9))
    lines.feed((B, range(100, 103)))
    assert lines.memory.can_resume_at(B, 9)
    lines.cut(B, 9)
    lines.feed((B, range(200, 205)))


def test_a_place_is_marked_once() -> None:
    memory_spec = member_spec("recurrent")
    memory = tiny_memory(memory_spec)
    feed(memory_spec, memory, (A, range(3)))
    memory.mark(A)
    memory.copy(A, B)
    memory.mark(A)
    memory.mark(B)
    assert memory._checkpoints.at(A, 3) is memory._checkpoints.at(B, 3)


def test_a_lone_checkpoint_is_the_least_missed() -> None:
    assert least_missed([7]) == 0
