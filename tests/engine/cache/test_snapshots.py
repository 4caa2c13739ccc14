"""What leaves a memory comes back as it was, whatever the cells; what is not whole is refused."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from engine.cache.cells import CellTable
from engine.cache.memory import MemorySpec, WindowSpec
from engine.cache.parts_memory import PartsMemory
from engine.cache.rows import RowBuffer, Slot
from engine.cache.table import build_memory
from engine.errors import Corrupt, EditRefused, NoSlot, StateError
from engine.state import PartKind, Point, Rows
from tests.engine.cache.harness import (
    A,
    B,
    C,
    Lent,
    buffers,
    feed,
    held_rows,
    pieces,
    spec,
    visible,
    windowed_of,
)

WINDOW = 6
TYPES = [("f32", "f32"), ("bf16", "f16"), ("q8_0", "q4_0"), ("q5_0", "bf16")]


def iswa(
    types: tuple[str, str] = ("f32", "f32"), cells: int = 30, num_cells: int = 120
) -> tuple[MemorySpec, PartsMemory]:
    memory_spec = spec(
        None, WindowSpec(WINDOW), size=64, types=types, max_batch=8, max_ubatch=8, num_cells=num_cells
    )
    return memory_spec, PartsMemory(memory_spec, CellTable(num_cells, 3), CellTable(cells, 3, WINDOW))


def grow(memory_spec: MemorySpec, memory: PartsMemory, length: int) -> tuple[int, ...]:
    for start in range(0, length, 8):
        feed(memory_spec, memory, (A, range(start, min(start + 8, length))))
    return memory.tokens_at(A, 0, length)


def stored(memory: PartsMemory, layer: int, seq: int) -> list[object]:
    return [tensor.tolist() for tensor in held_rows(memory, layer, seq)]  # type: ignore[arg-type]


@pytest.mark.parametrize("types", TYPES, ids="-".join)
@pytest.mark.parametrize("length", [1, 5, 6, 7, 29, 30, 31, 36, 50])
def test_a_restored_sequence_goes_on_with_equal_bits(length: int, types: tuple[str, str]) -> None:
    """Empty window, half full, full, about to wrap, wrapped."""
    memory_spec, memory = iswa(types)
    tokens = grow(memory_spec, memory, length)
    rows, points = memory.snapshot(A)
    _, other = iswa(types)
    feed(memory_spec, other, (C, range(900, 907)))
    other.restore(B, tokens, rows, points)
    assert other.tokens_at(B, 0, length) == tokens
    for token in range(600, 612):
        one, two = feed(memory_spec, memory, (A, [token])), feed(memory_spec, other, (B, [token]))
        assert all(torch.equal(a, b) for a, b in zip(one[0], two[0], strict=True))


def test_an_empty_sequence_has_no_rows_and_needs_none() -> None:
    _, memory = iswa()
    assert memory.snapshot(A) == ((), ())
    memory.restore(A, (), (), ())
    assert memory.pos_max(A) is None


def test_window_rows_go_as_far_back_as_memory_has_them() -> None:
    memory_spec, memory = iswa()
    grow(memory_spec, memory, 50)
    rows, _ = memory.snapshot(A)
    assert [(run.kind, run.start, run.stop) for run in rows] == [
        (PartKind.TOKEN, 0, 50),
        (PartKind.WINDOW, 20, 50),
    ]
    late, _ = memory.snapshot(A, since=45)
    assert [(run.start, run.stop) for run in late] == [(45, 50), (45, 50)]
    for run, whole in zip(late, rows, strict=True):
        for part, all_rows in zip(run.parts, whole.parts, strict=True):
            assert torch.equal(part, all_rows[45 - whole.start :])
    assert memory.snapshot(A, since=50) == ((), ())


def test_a_snapshot_is_a_copy() -> None:
    memory_spec, memory = iswa()
    grow(memory_spec, memory, 20)
    rows, _ = memory.snapshot(A)
    before = [part.clone() for run in rows for part in run.parts]
    memory.remove(A, 0, None)
    feed(memory_spec, memory, (A, range(500, 508)))
    assert all(torch.equal(a, b) for a, b in zip(before, (p for r in rows for p in r.parts), strict=True))


def test_runs_go_straight_into_cells_and_these_are_contiguous_where_they_can_be() -> None:
    memory_spec, memory = iswa()
    tokens = grow(memory_spec, memory, 25)
    rows, points = memory.snapshot(A)
    cut = tuple(piece for run in rows for piece in pieces(run, (7, 8, 20)))
    memory.keep(C)
    feed(memory_spec, memory, (C, range(3)))
    memory.restore(B, tokens, cut, points)
    again, _ = memory.snapshot(B)
    for run, before in zip(again, rows, strict=True):
        # Of window rows, a sequence's share of the cells.
        kept = 0 if run.kind is PartKind.TOKEN else 15
        assert (run.start, run.stop) == (kept, 25)
        assert all(torch.equal(a, b[kept:]) for a, b in zip(run.parts, before.parts, strict=True))
    cells = memory._tables.base.cells_of(B)
    assert cells.tolist() == list(range(cells[0], cells[0] + 25))


def test_bytes_of_any_alignment_can_be_restored() -> None:
    memory_spec, memory = iswa(("bf16", "f32"))
    tokens = grow(memory_spec, memory, 9)
    rows, points = memory.snapshot(A)
    crooked = []
    for run in rows:
        parts = []
        for part in run.parts:
            wide = torch.zeros(part.numel() + 3, dtype=torch.uint8)
            wide[3:] = part.flatten()
            parts.append(wide[3:].view(part.shape))
        crooked.append(replace(run, parts=tuple(parts)))
    memory.restore(B, tokens, tuple(crooked), points)
    assert all(stored(memory, layer, A) == stored(memory, layer, B) for layer in (0, 1))


def test_more_window_rows_than_fit_are_cut_to_what_does() -> None:
    memory_spec, wide = iswa(cells=90)
    tokens = grow(memory_spec, wide, 60)
    rows, points = wide.snapshot(A)
    assert rows[1].start == 0
    _, narrow = iswa(cells=30)
    feed(memory_spec, narrow, (C, range(8)))
    narrow.restore(A, tokens, rows, points)
    first, stop = windowed_of(narrow).held_range(A)
    assert (first, stop) == (50, 60)
    assert windowed_of(narrow).held_range(C) == (0, 8)
    one, two = feed(memory_spec, wide, (A, [800])), feed(memory_spec, narrow, (A, [800]))
    assert all(torch.equal(a, b) for a, b in zip(one[0], two[0], strict=True))


def test_a_full_windows_memory_restores_what_a_short_one_saved_and_knows_what_it_lacks() -> None:
    memory_spec, memory = iswa()
    tokens = grow(memory_spec, memory, 50)
    rows, points = memory.snapshot(A)
    full = build_memory(replace(memory_spec, full_windows=True))
    full.restore(B, tokens, rows, points)
    assert full.can_resume_at(B, 50)
    assert full.can_resume_at(B, 26)
    assert not full.can_resume_at(B, 25)
    again, _ = full.snapshot(B)
    assert [(run.start, run.stop) for run in again] == [(0, 50), (20, 50)]


def test_a_full_windows_memory_restores_every_row_that_there_is() -> None:
    memory_spec = spec(None, WindowSpec(WINDOW), full_windows=True, num_seqs=3)
    memory, other = build_memory(memory_spec), build_memory(memory_spec)
    for _ in range(3):
        feed(memory_spec, memory, (A, range(20)))
    rows, points = memory.snapshot(A)
    other.restore(B, memory.tokens_at(A, 0, 60), rows, points)
    assert all(other.can_resume_at(B, p) for p in range(61))


def test_positions_with_holes_have_no_state() -> None:
    memory_spec = spec()
    memory = build_memory(memory_spec)
    feed(memory_spec, memory, (A, range(10)))
    memory.remove(A, 3, 5)
    with pytest.raises(EditRefused, match="holes"):
        memory.snapshot(A)
    memory.shift(A, 5, None, -2)
    rows, points = memory.snapshot(A)
    memory.restore(B, memory.tokens_at(A, 0, 99), rows, points)
    assert stored(memory, 0, A) == stored(memory, 0, B)
    memory.divide(A, 0, None, 2)
    with pytest.raises(EditRefused, match="holes"):
        memory.snapshot(A)


def test_states_that_are_not_whole_are_refused_and_change_nothing() -> None:
    memory_spec, memory = iswa()
    tokens = grow(memory_spec, memory, 40)
    (token, window), _ = memory.snapshot(A)
    _, other = iswa()
    feed(memory_spec, other, (A, range(5)))
    before = visible(other)
    late = pieces(window, (36,))[1]
    misshapen = replace(token, parts=(token.parts[0][:, :-4], *token.parts[1:]))
    wide = replace(token, parts=(token.parts[0].view(torch.float32), *token.parts[1:]))
    block = Rows(PartKind.BLOCK, 0, 40, token.parts)
    a, b = pieces(token, (20,))
    bad: dict[str, tuple[Rows, ...]] = {
        "token rows are needed from 0 on, and there are none before 40": (window,),
        "window rows are needed from 34 on, and there are none before 36": (token, late),
        "window rows are needed from 34 on, and there are none before 40": (token,),
        "do not follow those up to 20": (a, a, window),
        "token rows are needed from 0 on, and there are none before 20": (b, a, window),
        "token rows end at 20": (a, window),
        "have 1 parts": (replace(token, parts=token.parts[:1]), window),
        "part kv.k.00": (misshapen, window),
        "part kv.k.00: torch.float32": (wide, window),
        "block rows, which this memory has not": (token, window, block),
    }
    for message, rows in bad.items():
        with pytest.raises(StateError, match=message):
            other.restore(B, tokens, rows, ())
        assert visible(other) == before
    with pytest.raises(StateError, match="point parts"):
        other.restore(B, tokens, (token, window), (Point(40, ()),))
    with pytest.raises(EditRefused, match="not empty"):
        other.restore(A, tokens, (token, window), ())
    assert visible(other) == before
    other.restore(B, tokens, (token, window), ())


def test_a_state_without_room_is_refused_and_changes_nothing() -> None:
    memory_spec, memory = iswa()
    tokens = grow(memory_spec, memory, 40)
    rows, points = memory.snapshot(A)
    _, other = iswa(num_cells=50)
    grow(memory_spec, other, 11)
    before = visible(other)
    with pytest.raises(NoSlot):
        other.restore(B, tokens, rows, points)
    assert visible(other) == before


def test_a_restore_that_breaks_off_leaves_the_sequence_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    memory_spec, memory = iswa()
    tokens = grow(memory_spec, memory, 40)
    rows, points = memory.snapshot(A)

    def broken(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(buffers(memory, 1)[1], "write_bytes", broken)
    free = memory.free_cells()
    with pytest.raises(MemoryError):
        memory.restore(B, tokens, rows, points)
    assert memory.pos_max(B) is None
    assert windowed_of(memory).pos_max(B) is None
    assert memory.free_cells() == free


def test_rows_are_copied_before_the_next_are_read() -> None:
    memory_spec, memory = iswa()
    tokens = grow(memory_spec, memory, 40)
    rows, points = memory.snapshot(A)
    (_, one), (_, other) = iswa(), iswa()
    one.restore(B, tokens, rows, points)
    other.restore(B, tokens, Lent.all(rows, (24, 32)), points)
    assert [stored(other, layer, B) for layer in (0, 1)] == [stored(one, layer, B) for layer in (0, 1)]


@pytest.mark.parametrize("damaged", range(6))
def test_rows_that_cannot_be_read_leave_all_as_it_was(damaged: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty sequence, and in place of one whose cells are written over."""
    memory_spec, memory = iswa(num_cells=70)
    tokens = grow(memory_spec, memory, 40)
    rows, points = memory.snapshot(A)
    memory.remove(A, 20, None)
    runs = Lent.all(rows, (24, 32))
    assert len(runs) == 6
    runs[damaged].damaged = True
    before, free = visible(memory), memory.free_cells()
    held = [stored(memory, layer, A) for layer in (0, 1)]
    for verb, seq in ((memory.restore, B), (memory.replace, A)):
        with pytest.raises(Corrupt):
            verb(seq, tokens, runs, points)
        assert (visible(memory), memory.free_cells()) == (before, free)
        assert [stored(memory, layer, A) for layer in (0, 1)] == held
    runs[damaged].damaged = False
    memory.replace(A, tokens, runs, points)
    assert memory.tokens_at(A, 0, 40) == tokens


@pytest.mark.parametrize("breaks_at", range(5))
def test_a_replacement_that_breaks_off_changes_nothing(
    breaks_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are written over where there is no other room: they are put back, those of others too."""
    memory_spec, memory = iswa(num_cells=70)
    feed(memory_spec, memory, (C, range(700, 708)))
    tokens = grow(memory_spec, memory, 40)
    rows, points = memory.snapshot(A)
    feed(memory_spec, memory, (A, range(8)))
    before, cells = visible(memory), owned(memory)
    calls, write_bytes = itertools.count(), RowBuffer.write_bytes

    def breaking(buffer: RowBuffer, slot: Slot, stored: torch.Tensor) -> None:
        if next(calls) == breaks_at:
            write_bytes(buffer, slot, torch.zeros_like(stored))
            raise MemoryError
        write_bytes(buffer, slot, stored)

    with monkeypatch.context() as patched:
        patched.setattr(RowBuffer, "write_bytes", breaking)
        if breaks_at < 4:
            with pytest.raises(MemoryError):
                memory.replace(A, tokens, rows, points)
            assert (visible(memory), owned(memory)) == (before, cells)
        else:
            memory.replace(A, tokens, rows, points)
    memory.replace(A, tokens, rows, points)
    again, _ = memory.snapshot(A)
    assert all(
        torch.equal(a[-10:], b[-10:])
        for run, old in zip(again, rows, strict=True)
        for a, b in zip(run.parts, old.parts, strict=True)
    )


def owned(memory: PartsMemory) -> list[object]:
    """Which sequences own which cells, in every table."""
    return [table.owners.tolist() for table, _ in memory._tables]


def test_what_a_window_lets_go_is_told() -> None:
    _, memory = iswa()
    assert memory.drops_rows()
    assert not build_memory(spec(None, WindowSpec(WINDOW), full_windows=True)).drops_rows()
    assert not build_memory(spec()).drops_rows()
    # As many cells as there are tokens of all sequences: the last one is taken when nothing else is free.
    assert not build_memory(spec(None, WindowSpec(WINDOW), num_cells=30)).drops_rows()
