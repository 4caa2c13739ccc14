"""Sliding windows: how long their caches are, what they drop, and where a sequence can go on."""

from __future__ import annotations

import pytest
import torch

from engine.cache.cells import CellTable
from engine.cache.iswa import longest_window, window_cells
from engine.cache.memory import MemorySpec, WindowSpec
from engine.cache.parts_memory import PartsMemory
from engine.cache.table import build_memory
from engine.errors import EditRefused
from engine.state import PartKind
from tests.engine.cache.harness import (
    A,
    B,
    C,
    dense,
    feed,
    held_rows,
    layers_of,
    queries,
    spec,
    visible,
)

WINDOW = 6


def short(window: WindowSpec, cells: int = 20) -> tuple[MemorySpec, PartsMemory]:
    """A window layer beside a full one, over a table that wraps after `cells` tokens."""
    memory_spec = spec(None, window, max_batch=8)
    return memory_spec, PartsMemory(memory_spec, CellTable(96, 3), CellTable(cells, 3, window.size))


@pytest.mark.parametrize(
    ("window", "max_batch", "num_seqs", "expected"),
    [
        (512, 512, 1, 1024),
        (512, 100, 1, 768),
        (500, 2, 3, 3 * 768),
        (1024, 2048, 4, 4 * 3072),
        (4096, 512, 8, 32768),
    ],
)
def test_window_layers_are_as_long_as_windows_and_a_batch_ask(
    window: int, max_batch: int, num_seqs: int, expected: int
) -> None:
    memory_spec = spec(
        None, WindowSpec(window), WindowSpec(7), num_seqs=num_seqs, max_batch=max_batch, num_cells=32768
    )
    assert longest_window(memory_spec) == window
    assert window_cells(memory_spec, window) == expected


def test_full_windows_are_as_long_as_the_context() -> None:
    memory_spec = spec(None, WindowSpec(WINDOW), num_cells=5000, full_windows=True)
    assert window_cells(memory_spec, WINDOW) == 5000


def test_rows_behind_a_window_stay_until_their_room_is_needed() -> None:
    memory_spec, memory = short(WindowSpec(WINDOW))
    for count in (8, 8, 4):
        feed(memory_spec, memory, (A, range(count)))
    assert held_rows(memory, 1, A)[0].tolist() == list(range(20))
    feed(memory_spec, memory, (A, range(3)))
    assert held_rows(memory, 1, A)[0].tolist() == list(range(3, 23))
    assert held_rows(memory, 0, A)[0].tolist() == list(range(23))
    assert (memory.pos_min(A), memory.pos_max(A)) == (0, 22)


@pytest.mark.parametrize("window", [WindowSpec(WINDOW), WindowSpec(WINDOW, chunked=True)], ids=str)
def test_where_a_sequence_says_that_it_can_go_on_it_goes_on_exactly(window: WindowSpec) -> None:
    tokens = list(range(40))
    can = []
    for position in range(38):
        memory_spec, memory = short(window)
        feed(memory_spec, memory, *((A, tokens[:8]),))
        for start in range(8, 38, 6):
            feed(memory_spec, memory, (A, tokens[start : start + 6]))
        assert held_rows(memory, 1, A)[0].tolist() == list(range(18, 38))
        if not memory.can_resume_at(A, position):
            before = visible(memory)
            with pytest.raises(EditRefused, match=f"cannot go on at {position}"):
                memory.remove(A, position, None)
            with pytest.raises(EditRefused, match="window rows are gone"):
                memory.copy(A, B, 0, position)
            assert visible(memory) == before
            continue
        can.append(position)
        memory.copy(A, B, 0, position)
        memory.remove(A, position, None)
        new = [70, 71, 72]
        for seq in (A, B):
            ((_, out),) = feed(memory_spec, memory, (seq, new))
            at = range(position, position + 3)
            expected = dense(
                queries(new, layers_of(memory_spec)[1], 4),
                at,
                tokens[:position] + new,
                range(position + 3),
                layers_of(memory_spec)[1],
            )
            assert torch.allclose(out.double(), expected, atol=1e-5)
    assert can == [0, *range(18 + WINDOW, 38)]


@pytest.mark.parametrize("window", [WindowSpec(WINDOW), WindowSpec(WINDOW, chunked=True)], ids=str)
def test_where_a_sequence_can_go_on_its_state_is_whole(window: WindowSpec) -> None:
    memory_spec, memory = short(window)
    for start in range(0, 40, 8):
        feed(memory_spec, memory, (A, range(start, start + 8)))
    for position in (p for p in range(1, 41) if memory.can_resume_at(A, p)):
        memory.copy(A, B, 0, position)
        _, run = memory.snapshot(B)[0]
        assert run.kind is PartKind.WINDOW
        # Its last `size` rows, which is what a store asks for.
        assert run.start <= position - WINDOW
        assert run.stop == position


def test_the_longest_window_of_a_memory_decides() -> None:
    memory_spec = spec(None, WindowSpec(3), WindowSpec(9), max_batch=8)
    memory = PartsMemory(memory_spec, CellTable(96, 3), CellTable(20, 3, 9))
    for _ in range(4):
        feed(memory_spec, memory, (A, range(8)))
    assert [p for p in range(33) if memory.can_resume_at(A, p)] == [0, *range(21, 33)]


def test_nothing_can_go_on_where_it_never_was() -> None:
    memory_spec, memory = short(WindowSpec(WINDOW))
    feed(memory_spec, memory, (A, range(5)))
    assert memory.can_resume_at(A, 5)
    assert not memory.can_resume_at(A, 6)
    assert not memory.can_resume_at(A, -1)
    assert memory.can_resume_at(C, 0)


def test_the_middle_cannot_be_removed_from_a_short_window() -> None:
    memory_spec, memory = short(WindowSpec(WINDOW))
    feed(memory_spec, memory, (A, range(8)))
    before = visible(memory)
    for start, stop in ((0, 3), (2, 5), (0, 7)):
        with pytest.raises(EditRefused, match="only the end"):
            memory.remove(A, start, stop)
        with pytest.raises(EditRefused, match="only the end"):
            memory.remove(None, start, stop)
    with pytest.raises(EditRefused, match="only the end"):
        memory.copy(A, B, 2)
    assert visible(memory) == before
    memory.remove(A, 5, 8)
    memory.remove(A, 3, 100)
    assert memory.tokens_at(A, 0, 9) == (0, 1, 2)


def test_full_windows_allow_every_edit() -> None:
    memory_spec = spec(None, WindowSpec(3), full_windows=True)
    memory = build_memory(memory_spec)
    assert {part.kind for part in memory.layout} == {PartKind.TOKEN, PartKind.WINDOW}
    feed(memory_spec, memory, (A, range(30)))
    assert all(memory.can_resume_at(A, p) for p in range(31))
    assert memory.refuse_shift() is None
    memory.remove(A, 4, 9)
    memory.shift(A, 9, None, -5)
    memory.copy(A, B, 2, 10)
    memory.divide(A, 0, None, 2)
    assert memory.pos_max(A) == 12


def test_short_windows_say_why_they_cannot_shift() -> None:
    memory_spec, memory = short(WindowSpec(WINDOW))
    feed(memory_spec, memory, (A, range(8)))
    before = visible(memory)
    reason = memory.refuse_shift()
    assert reason is not None
    assert "full_windows" in reason
    with pytest.raises(EditRefused, match="full_windows"):
        memory.shift(A, 2, None, -1)
    with pytest.raises(EditRefused, match="full_windows"):
        memory.divide(A, 0, None, 2)
    assert visible(memory) == before


def test_a_refused_edit_of_all_sequences_changes_none() -> None:
    memory_spec, memory = short(WindowSpec(WINDOW), cells=34)
    feed(memory_spec, memory, (B, range(4)))
    for _ in range(5):
        feed(memory_spec, memory, (A, range(8)))
    assert not memory.can_resume_at(A, 3)
    before = visible(memory)
    with pytest.raises(EditRefused):
        memory.remove(None, 3, None)
    assert visible(memory) == before


def test_keeping_one_sequence_forgets_the_others_everywhere() -> None:
    memory_spec, memory = short(WindowSpec(WINDOW), cells=34)
    feed(memory_spec, memory, (A, range(6)), (C, range(2)))
    feed(memory_spec, memory, (B, range(8)))
    kept = [held_rows(memory, layer, B)[1].tolist() for layer in (0, 1)]
    memory.keep(B)
    for seq in (A, C):
        assert memory.pos_max(seq) is None
        assert [len(held_rows(memory, layer, seq)[0]) for layer in (0, 1)] == [0, 0]
    assert [held_rows(memory, layer, B)[1].tolist() for layer in (0, 1)] == kept


def test_layouts_list_parts_by_kind_then_layer_then_name() -> None:
    memory = build_memory(spec(WindowSpec(4), None, WindowSpec(4)))
    assert [(part.kind, part.name, part.window) for part in memory.layout] == [
        (PartKind.TOKEN, "kv.k.01", None),
        (PartKind.TOKEN, "kv.v.01", None),
        (PartKind.WINDOW, "kv.k.00", 4),
        (PartKind.WINDOW, "kv.v.00", 4),
        (PartKind.WINDOW, "kv.k.02", 4),
        (PartKind.WINDOW, "kv.v.02", 4),
    ]
