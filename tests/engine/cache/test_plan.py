"""A plan is one transaction: it fits whole or not at all, and rolled back it has never been."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.batch import Batch
from engine.cache.cells import CellTable
from engine.cache.memory import MemorySpec, WindowSpec
from engine.cache.parts_memory import PartsMemory
from engine.cache.table import build_memory
from engine.errors import BatchRefused, NoSlot
from engine.state import SeqId
from tests.engine.cache.harness import (
    A,
    B,
    C,
    batch_of,
    feed,
    feed_plan,
    masked,
    run_layers,
    spec,
    visible,
    windowed_of,
)

WINDOW = 6


def wrapped(types: tuple[str, str] = ("f32", "f32")) -> tuple[MemorySpec, PartsMemory]:
    """Two sequences over full and window layers, whose window rows have been reused and will be again."""
    memory_spec = spec(
        None, WindowSpec(WINDOW), size=32, types=types, max_ubatch=4, max_batch=12, num_cells=80
    )
    memory = PartsMemory(memory_spec, CellTable(80, 3), CellTable(34, 3, WINDOW))
    for start in range(0, 24, 8):
        feed(memory_spec, memory, (A, range(start, start + 8)), (B, range(500 + start, 504 + start)))
    return memory_spec, memory


@pytest.mark.parametrize("types", [("f32", "f32"), ("q8_0", "q4_0"), ("bf16", "f16")], ids="-".join)
@pytest.mark.parametrize("applied", [0, 1, 2, 3])
def test_a_rolled_back_plan_has_never_been(applied: int, types: tuple[str, str]) -> None:
    memory_spec, memory = wrapped(types)
    before = visible(memory)
    plan = memory.plan(batch_of((A, 24, range(700, 710)), (B, 12, range(800, 802))))
    assert visible(memory) == before
    assert len(plan.ubatches) == 3
    for index in range(applied):
        run_layers(memory_spec, plan.ubatches[index], plan.apply(index))
    if applied == 3:
        assert windowed_of(memory).held_range(A)[0] > 0
        assert visible(memory) != before
    plan.rollback()
    assert visible(memory) == before


def test_a_plan_that_failed_halfway_through_the_layers_is_rolled_back_too() -> None:
    memory_spec, memory = wrapped()
    before = visible(memory)
    plan = memory.plan(batch_of((A, 24, range(700, 712))))
    run_layers(memory_spec, plan.ubatches[0], plan.apply(0))
    plan.apply(1)
    plan.rollback()
    assert visible(memory) == before


def test_a_rollback_goes_back_step_by_step() -> None:
    """The first ubatch drops rows whose cells the second one takes: B's come before the rest of A's."""
    memory_spec = spec(None, WindowSpec(2), max_ubatch=4, max_batch=8)
    memory = PartsMemory(memory_spec, CellTable(96, 3), CellTable(20, 3, 2))
    feed(memory_spec, memory, (C, range(8)))
    feed(memory_spec, memory, (C, range(8, 16)))
    feed(memory_spec, memory, (C, range(16, 20)))
    before = visible(memory)
    mixed = batch_of((A, 0, [100]), (B, 0, [200, 201, 202]), (A, 1, [101, 102, 103, 104]))
    plan = memory.plan(mixed)
    first, second = plan._slots[1].cells[:4], plan._slots[1].cells[4:]
    assert windowed_of(memory).positions[first].max() > windowed_of(memory).positions[second].max()
    feed_plan(memory_spec, plan)
    plan.rollback()
    assert visible(memory) == before


def test_what_is_computed_after_a_rollback_is_what_would_have_been() -> None:
    outputs = []
    for roll_back in (False, True):
        memory_spec, memory = wrapped()
        if roll_back:
            plan = memory.plan(batch_of((B, 12, range(900, 912))))
            feed_plan(memory_spec, plan)
            plan.rollback()
        outputs.append([feed(memory_spec, memory, (A, [700 + i]), (B, [800 + i])) for i in range(9)])
    for one, other in zip(*outputs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))


def test_no_plan_takes_a_row_that_a_sequence_needs_where_it_begins() -> None:
    memory_spec = spec(None, WindowSpec(WINDOW), max_batch=9, num_cells=80)
    memory = PartsMemory(memory_spec, CellTable(80, 3), CellTable(3 * (WINDOW + 9), 3, WINDOW))
    random = np.random.default_rng(0)
    ends = [0, 0, 0]
    for _ in range(200):
        seq = SeqId(int(random.integers(3)))
        count = int(random.integers(1, 10))
        if ends[seq] + count > 25:
            memory.remove(seq, 0, None)
            ends[seq] = 0
        plan = memory.plan(batch_of((seq, ends[seq], range(count))))
        windowed = windowed_of(memory)
        for one in map(SeqId, range(3)):
            needed = set(windowed.cells_of(one, ends[one] - WINDOW).tolist())
            assert len(needed) == min(WINDOW, ends[one])
            assert not needed & set(plan._slots[1].cells.tolist())
        feed_plan(memory_spec, plan)
        plan.commit()
        ends[seq] += count


@pytest.mark.parametrize("build", [masked, build_memory])
def test_what_does_not_fit_is_refused_before_anything_changes(build) -> None:  # type: ignore[no-untyped-def]
    memory_spec = spec(None, WindowSpec(WINDOW), num_cells=32, max_batch=32)
    memory = build(memory_spec)
    feed(memory_spec, memory, (A, range(10)), (B, range(15)))
    before = visible(memory)
    with pytest.raises(NoSlot, match="no room for 8 tokens"):
        memory.plan(batch_of((A, 10, range(4)), (C, 0, range(4))))
    assert visible(memory) == before
    assert memory.free_cells() == 7
    feed(memory_spec, memory, (A, range(7)))
    assert memory.free_cells() == 0


def test_tokens_go_on_where_their_sequence_ends() -> None:
    memory_spec = spec(max_batch=8)
    memory = build_memory(memory_spec)
    feed(memory_spec, memory, (A, range(3)))
    before = visible(memory)
    late, early = batch_of((A, 4, [1])), batch_of((A, 2, [1]))
    hole = Batch(np.array([1, 2]), np.array([3, 5]), np.array([0, 0]), np.array([True, True]))
    stranger = batch_of((SeqId(3), 0, [1]))
    long, empty = batch_of((A, 3, range(9))), batch_of((A, 3, []))
    for batch in (late, early, hole, stranger, long, empty):
        with pytest.raises(BatchRefused):
            memory.plan(batch)
    assert visible(memory) == before
    feed(memory_spec, memory, (A, range(3, 6)))


def test_a_memory_has_one_plan_at_a_time() -> None:
    memory_spec = spec()
    memory = build_memory(memory_spec)
    plan = memory.plan(batch_of((A, 0, range(3))))
    for verb in (
        lambda: memory.plan(batch_of((A, 0, range(3)))),
        lambda: memory.remove(A, 0, None),
        lambda: memory.snapshot(A),
        lambda: memory.keep(A),
    ):
        with pytest.raises(AssertionError):
            verb()
    plan.rollback()
    memory.plan(batch_of((A, 0, range(3)))).rollback()


def test_media_positions_are_kept_with_their_tokens() -> None:
    memory_spec = spec(max_ubatch=2)
    memory = build_memory(memory_spec)
    grid = np.array([[0, 0], [1, 0], [0, 1]])
    plan = memory.plan(Batch(np.arange(3), np.arange(3), np.zeros(3, np.int64), np.ones(3, np.bool_), grid))
    feed_plan(memory_spec, plan)
    plan.commit()
    cells = memory._tables.base.cells_of(A)
    assert memory._tables.base.grid[cells].tolist() == grid.tolist()


def test_caches_can_share_a_table_by_reference() -> None:
    table = CellTable(20, 3)
    memory_spec = spec(num_cells=20)
    one, other = PartsMemory(memory_spec, table, None), PartsMemory(memory_spec, table, None)
    feed(memory_spec, one, (A, range(6)))
    assert other.tokens_at(A, 0, 9) == (0, 1, 2, 3, 4, 5)
    other.remove(A, 4, None)
    assert one.pos_max(A) == 3
