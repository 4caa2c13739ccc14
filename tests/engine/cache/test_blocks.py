"""Block rows: one for every block that closed, wherever ubatches, forks and rewinds cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.cache.memory import BlocksSpec, MemoryNeeds, MemorySpec
from engine.cache.parts_memory import PartsMemory
from engine.errors import EditRefused, StateError
from engine.state import PartKind, Rows
from tests.engine.cache.harness import A, B, C, batch_of
from tests.engine.cache.members import (
    Lines,
    block_rows,
    compute,
    everything,
    feed,
    member_spec,
    plain,
    stored,
    tiny_memory,
)

SIZES = (2, 3, 5, 7)
NAMES = {size: f"pool{size}.k" for size in SIZES}


def blocky(**options: object) -> tuple[MemorySpec, PartsMemory]:
    """Blocks of several sizes beside keys and values."""
    memory_spec = member_spec("kv", **options)  # type: ignore[arg-type]
    blocks = (BlocksSpec(NAMES[size], i % 2, 4, size) for i, size in enumerate(SIZES))
    needs = MemoryNeeds("kv", (*memory_spec.needs.parts, *blocks))
    memory_spec = replace(memory_spec, needs=needs)
    return memory_spec, tiny_memory(memory_spec)


@pytest.mark.parametrize("max_ubatch", [1, 2, 5, 32])
@pytest.mark.parametrize("pieces", [(1,) * 22, (22,), (1, 2, 3, 4, 5, 6), (5, 1, 9, 1, 1, 4)], ids=str)
def test_every_block_that_closes_gets_a_row_of_its_tokens(pieces: tuple[int, ...], max_ubatch: int) -> None:
    lines = Lines(*blocky(max_ubatch=max_ubatch))
    at = 0
    for count in pieces:
        lines.feed((A, range(at, at + count)))
        at += count


def test_sequences_of_one_batch_close_their_own_blocks() -> None:
    lines = Lines(*blocky(max_ubatch=4))
    for start in range(0, 15, 5):
        lines.feed((A, range(start, start + 5)), (B, range(100 + start, 103 + start)), (C, [200 + start]))


@pytest.mark.parametrize("length", range(1, 15))
def test_forks_close_blocks_of_their_own_over_shared_tokens(length: int) -> None:
    lines = Lines(*blocky(max_ubatch=4))
    lines.feed((A, range(length)))
    lines.copy(A, B)
    lines.copy(B, C, length // 2)
    lines.feed((A, range(100, 108)), (B, range(200, 206)), (C, range(300, 309)))
    for size, table in lines.memory._tables.blocks.items():
        shared, half = length // size, length // 2 // size
        ends = (length + 8, length + 6, length // 2 + 9)
        own = sum(end // size - since for end, since in zip(ends, (shared, shared, half), strict=True))
        assert int(table.owners.any(0).sum()) == shared + own


@pytest.mark.parametrize("length", range(16))
def test_a_rewind_into_a_block_opens_it_again(length: int) -> None:
    lines = Lines(*blocky(max_ubatch=4))
    lines.feed((A, range(16)))
    lines.copy(A, B)
    lines.cut(A, length)
    assert lines.memory.can_resume_at(A, length)
    lines.feed((A, range(100, 106)))
    lines.feed((B, range(200, 203)))


@pytest.mark.parametrize("applied", range(4))
def test_blocks_that_closed_in_a_plan_go_with_it(applied: int) -> None:
    memory_spec, memory = blocky(max_ubatch=4, max_batch=12)
    feed(memory_spec, memory, (A, range(9)), (B, range(50, 52)))
    memory.copy(A, C)
    before = everything(memory)
    plan = memory.plan(batch_of((A, 9, range(100, 108)), (B, 2, range(150, 154))))
    assert everything(memory) == before
    for index, ubatch in enumerate(plan.ubatches[:applied]):
        compute(memory_spec, ubatch, plan.apply(index))
    assert (everything(memory) == before) == (applied == 0)
    plan.rollback()
    assert everything(memory) == before


def test_blocks_never_run_out_before_tokens_do() -> None:
    """Every sequence can close a block over the same tokens."""
    lines = Lines(*blocky(num_cells=9))
    lines.feed((A, range(4)))
    lines.copy(A, B)
    lines.copy(A, C)
    lines.feed((A, [10]), (B, [20]), (C, [30]))
    lines.feed((A, [11, 12]))
    assert lines.memory.free_cells() == 0
    lines.memory.keep(B)
    for seq in (A, C):
        lines.tokens[seq] = []
    lines.feed((B, range(30, 34)))


def test_only_the_end_of_closed_blocks_can_go_and_nothing_can_move() -> None:
    memory_spec, memory = blocky()
    feed(memory_spec, memory, (A, range(10)))
    before = everything(memory)
    for verb in (
        lambda: memory.remove(A, 2, 5),
        lambda: memory.remove(None, 0, 3),
        lambda: memory.copy(A, B, 1),
        lambda: memory.shift(A, 4, None, -1),
        lambda: memory.divide(A, 0, None, 2),
        lambda: memory.discard(A, 2, 4),
    ):
        with pytest.raises(EditRefused, match="closed blocks"):
            verb()
    assert everything(memory) == before


def test_a_row_for_each_block_that_closes_is_asked_for() -> None:
    _, memory = blocky()
    plan = memory.plan(batch_of((A, 0, range(4))))
    view = plan.apply(0)
    with pytest.raises(AssertionError, match="a row for each block"):
        view.close(NAMES[2], 0, view.segments[0], torch.zeros((1, 4)))
    plan.rollback()


@pytest.mark.parametrize("length", range(1, 16))
def test_a_state_in_the_middle_of_a_block_comes_back(length: int) -> None:
    memory_spec, memory = blocky(max_ubatch=4)
    feed(memory_spec, memory, (A, range(length)))
    rows, points = memory.snapshot(A)
    block_run = next(run for run in rows if run.kind is PartKind.BLOCK)
    assert [len(part) for part in block_run.parts] == [length // size for size in (2, 5, 3, 7)]
    lines = Lines(*blocky(max_ubatch=4))
    lines.feed((C, range(500, 505)))
    lines.memory.restore(B, tuple(range(length)), rows, points)
    lines.tokens[B] = list(range(length))
    lines.check()
    lines.feed((B, range(100, 108)))


def test_runs_of_blocks_may_be_cut_anywhere() -> None:
    memory_spec, memory = blocky()
    feed(memory_spec, memory, (A, range(15)))
    (tokens, blocks), _ = memory.snapshot(A)
    for cut in range(16):
        late, early = memory.snapshot(A, cut)[0], []
        if cut:
            memory.copy(A, B, 0, cut)
            early = [run for run in memory.snapshot(B)[0] if run.kind is PartKind.BLOCK]
            memory.remove(B, 0, None)
        runs = (*early, *(run for run in late if run.kind is PartKind.BLOCK))
        assert [(run.start, run.stop) for run in runs] == [(a, b) for a, b in ((0, cut), (cut, 15)) if a < b]
        memory.restore(B, tuple(range(15)), (tokens, *runs), ())
        assert all(torch.equal(a[1], b[1]) for a, b in zip(*map(list, both(memory)), strict=True))
        memory.remove(B, 0, None)
    short = Rows(PartKind.BLOCK, 0, 15, tuple(part[:-1] for part in blocks.parts))
    with pytest.raises(StateError, match=r"part pool2.k.00"):
        memory.restore(B, tuple(range(15)), (tokens, short), ())
    with pytest.raises(StateError, match="block rows are needed from 0 on"):
        memory.restore(B, tuple(range(15)), (tokens,), ())


def both(memory: PartsMemory) -> list[list[tuple[list[int], torch.Tensor]]]:
    return [list(stored(memory, seq).values()) for seq in (A, B)]


@pytest.mark.parametrize("dtype", ["bf16", "q8_0", "q4_0"])
def test_block_rows_are_stored_as_the_settings_say(dtype: str) -> None:
    memory_spec = member_spec("hybrid_idx", size=64, types=(dtype, "f32"))
    memory = tiny_memory(memory_spec)
    (seen,) = feed(memory_spec, memory, (A, range(14)))
    need = next(need for need in memory_spec.needs.parts if isinstance(need, BlocksSpec))
    (blocks,) = seen.blocks.values()
    expected = block_rows(need, range(14))
    error = (plain(memory, ("pool.k", 0), blocks) - expected).norm() / expected.norm()
    assert 0 < error < {"bf16": 0.01, "q8_0": 0.01, "q4_0": 0.14}[dtype]
    assert (memory._parts.blocks["pool.k", 0].buffer.hadamard is not None) == (dtype != "bf16")
