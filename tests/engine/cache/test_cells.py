"""Laws of the cell table: where new cells are, who owns what, and that edits of one are unseen by others."""

from __future__ import annotations

import time

import numpy as np
import pytest

from engine.cache.cells import CellTable
from engine.errors import EditRefused, NoSlot
from engine.state import SeqId
from tests.engine.cache.harness import A, B, C


def append(table: CellTable, seq: SeqId, count: int) -> np.ndarray:
    """Put `count` tokens, numbered by their position, at the end of a sequence."""
    (cells,) = table.find_slot([(seq, count)])
    first = table.next_position(seq)
    positions = np.arange(first, first + count)
    grid = np.stack((positions, -positions), 1)
    table.occupy(cells, np.full(count, seq), positions, 1000 * (seq + 1) + positions, grid)
    return cells


def metadata(table: CellTable) -> list[object]:
    """What each sequence holds, whichever cells it is in."""
    out: list[object] = []
    for seq in map(SeqId, range(table.num_seqs)):
        cells = table.cells_of(seq)
        out.append(
            (table.positions[cells].tolist(), table.tokens[cells].tolist(), table.grid[cells].tolist())
        )
    return out


def test_a_lone_sequence_is_contiguous_however_it_grew() -> None:
    table = CellTable(100, 3)
    for count in (1, 7, 1, 30, 1, 60):
        append(table, A, count)
    assert table.cells_of(A).tolist() == list(range(100))


def test_a_new_sequence_leaves_room_behind_its_neighbours() -> None:
    table = CellTable(120, 3)
    for seq in (A, B, C):
        append(table, seq, 10)
    for _ in range(15):
        for seq in (A, B, C):
            append(table, seq, 1)
    for seq in (A, B, C):
        cells = table.cells_of(seq)
        assert (np.diff(cells) == 1).all()


def test_a_large_newcomer_has_as_much_room_behind_it_as_it_leaves_before_it() -> None:
    table = CellTable(30, 3)
    append(table, A, 4)
    assert append(table, B, 20).tolist() == list(range(7, 27))


def test_a_sequence_that_meets_another_goes_on_where_both_have_room() -> None:
    table = CellTable(90, 3)
    append(table, A, 10)
    table.copy(A, B, 0, None)
    for _ in range(20):
        append(table, A, 1)
        append(table, B, 1)
    assert table.cells_of(A).tolist() == list(range(30))
    assert (np.diff(table.cells_of(B, 10)) == 1).all()
    assert table.cells_of(B, 10)[0] == 10 + 1 + (90 - 11) // 2


def test_all_cells_can_be_used_in_whatever_pieces_they_are() -> None:
    table = CellTable(20, 3)
    append(table, A, 20)
    for position in (1, 4, 5, 9, 19):
        table.remove(A, position, position + 1)
    assert sorted(append(table, B, 5).tolist()) == [1, 4, 5, 9, 19]
    with pytest.raises(NoSlot):
        table.find_slot([(B, 1)])


def test_sequences_of_one_request_get_cells_of_their_own() -> None:
    table = CellTable(30, 3)
    append(table, A, 3)
    append(table, B, 2)
    found = table.find_slot([(A, 10), (B, 10), (C, 5)])
    assert [len(cells) for cells in found] == [10, 10, 5]
    every = np.concatenate(found)
    assert len(np.unique(every)) == 25
    assert not table.owners[:, every].any()


def test_looking_for_room_changes_nothing() -> None:
    table = CellTable(30, 3, window=4)
    append(table, A, 25)
    before = table.owners.copy(), table.positions.copy(), table.clock
    table.find_slot([(A, 10), (B, 3)])
    with pytest.raises(NoSlot):
        table.find_slot([(A, 10), (B, 17)])
    assert np.array_equal(table.owners, before[0])
    assert np.array_equal(table.positions, before[1])
    assert table.clock == before[2]


def test_taken_window_cells_drop_what_was_before_them_and_can_be_put_back() -> None:
    table = CellTable(12, 3, window=4)
    append(table, A, 10)
    before = metadata(table)
    (cells,) = table.find_slot([(A, 5)])
    assert not set(table.cells_of(A, 6).tolist()) & set(cells.tolist())
    saved = table.occupy(cells, np.zeros(5, np.int64), np.arange(10, 15), np.zeros(5, np.int64), None)
    assert table.held_range(A) == (3, 15)
    table.put_back(saved)
    assert metadata(table) == before


def test_who_loses_a_cell_out_of_turn_loses_what_was_before_it_and_other_owners_do_not() -> None:
    table = CellTable(16, 3, window=2)
    append(table, A, 8)
    table.copy(A, B, 0, None)
    append(table, A, 8)
    before, clock = metadata(table), table.clock
    (cells,) = table.find_slot([(C, 3)])
    assert sorted(table.positions[cells].tolist()) == [0, 1, 8]
    saved = table.occupy(cells, np.full(3, C), np.arange(3), np.arange(3), None)
    assert table.positions_of(A).tolist() == list(range(9, 16))
    assert table.positions_of(B).tolist() == list(range(2, 8))
    table.put_back(saved)
    assert metadata(table) == before
    assert table.clock == clock


def test_the_stalest_window_cells_go_first_whoever_owns_them() -> None:
    table = CellTable(20, 3, window=2)
    append(table, A, 12)
    append(table, B, 8)
    append(table, C, 6)
    assert table.held_range(A) == (5, 12)
    assert table.held_range(B) == (1, 8)


def test_a_shared_window_cell_is_kept_while_one_owner_needs_it() -> None:
    table = CellTable(10, 3, window=4)
    append(table, A, 4)
    table.copy(A, B, 0, None)
    append(table, A, 5)
    assert table.takeable().sum() == 10 - 8
    table.remove(B, 0, None)
    assert table.takeable().sum() == 10 - 4


def test_copies_own_the_same_cells() -> None:
    table = CellTable(20, 3)
    append(table, A, 8)
    append(table, B, 3)
    table.copy(A, B, 2, 6)
    assert table.cells_of(B).tolist() == table.cells_of(A, 2, 6).tolist()
    assert int((~table.owners.any(0)).sum()) == 12
    table.remove(A, 0, None)
    assert table.positions_of(B).tolist() == [2, 3, 4, 5]


def test_all_sequences_are_meant_by_none() -> None:
    table = CellTable(20, 3)
    for seq in (A, B):
        append(table, seq, 5)
    table.copy(A, C, 0, 3)
    table.remove(None, 2, 4)
    assert [table.positions_of(seq).tolist() for seq in (A, B, C)] == [[0, 1, 4], [0, 1, 4], [0, 1]]
    move = table.plan_move(None, 1, None, lambda positions: positions + 10)
    assert (move.sources == move.targets).all()
    table.apply_move(move)
    assert [table.positions_of(seq).tolist() for seq in (A, B, C)] == [[0, 11, 14], [0, 11, 14], [0, 11]]
    table.keep(B)
    assert [table.positions_of(seq).tolist() for seq in (A, B, C)] == [[], [0, 11, 14], []]


def test_moving_shared_cells_copies_them_and_no_others() -> None:
    table = CellTable(20, 3)
    append(table, A, 4)
    table.copy(A, B, 0, None)
    append(table, B, 3)
    before = metadata(table)
    move = table.plan_move(B, 2, None, lambda positions: positions + 5)
    assert metadata(table) == before
    assert (move.sources != move.targets).sum() == 2
    table.apply_move(move)
    assert metadata(table)[A] == before[A]
    cells = table.cells_of(B)
    assert table.positions[cells].tolist() == [0, 1, 7, 8, 9, 10, 11]
    assert table.tokens[cells].tolist() == [1000, 1001, 1002, 1003, 2004, 2005, 2006]
    assert table.grid[cells][:, 0].tolist() == list(range(7))


def test_divided_tokens_stay_in_the_order_in_which_they_came() -> None:
    table = CellTable(12, 2)
    append(table, A, 12)
    table.remove(A, 0, 6)
    append(table, A, 6)  # into the cells before
    table.apply_move(table.plan_move(A, 0, None, lambda positions: positions // 3))
    cells = table.cells_of(A)
    assert table.positions[cells].tolist() == [p // 3 for p in range(6, 18)]
    assert table.tokens[cells].tolist() == list(range(1006, 1018))


def test_copied_tokens_keep_their_order_too() -> None:
    table = CellTable(30, 3)
    append(table, A, 12)
    append(table, B, 18)
    table.remove(A, 0, 6)
    append(table, A, 6)  # into the cells before
    table.remove(B, 0, None)
    table.copy(A, C, 0, None)
    table.apply_move(table.plan_move(C, 0, None, lambda positions: positions + 1))
    table.apply_move(table.plan_move(C, 0, None, lambda positions: positions // 3))
    assert table.tokens[table.cells_of(C)].tolist() == list(range(1006, 1018))


def test_shared_cells_that_do_not_move_are_not_copied() -> None:
    table = CellTable(20, 3)
    append(table, A, 8)
    table.copy(A, B, 0, None)
    for divisor, copied in ((1, 0), (2, 7)):
        move = table.plan_move(B, 0, None, lambda positions, by=divisor: positions // by)  # type: ignore[misc]
        assert (move.sources != move.targets).sum() == copied


def test_two_tokens_never_collide_and_none_is_lost_for_want_of_room() -> None:
    table = CellTable(10, 2)
    append(table, A, 6)
    table.copy(A, B, 0, None)
    before = metadata(table)
    with pytest.raises(EditRefused, match="position 2"):
        table.plan_move(A, 3, None, lambda positions: positions - 1)
    with pytest.raises(NoSlot):
        table.plan_move(A, 0, None, lambda positions: positions + 1)
    assert metadata(table) == before


def test_ranges_are_what_is_held() -> None:
    table = CellTable(20, 2)
    assert (table.pos_min(A), table.pos_max(A), table.next_position(A)) == (None, None, 0)
    assert table.held_range(A) == (0, 0)
    append(table, A, 10)
    table.remove(A, 0, 2)
    table.remove(A, 5, 6)
    assert (table.pos_min(A), table.pos_max(A), table.next_position(A)) == (2, 9, 10)
    assert table.held_range(A) == (6, 10)


def test_time_does_not_grow_with_tokens_as_it_would_in_a_loop() -> None:
    table = CellTable(200_000, 4)
    start = time.perf_counter()
    for seq in (A, B):
        append(table, seq, 60_000)
    table.copy(A, C, 0, None)
    table.apply_move(table.plan_move(C, 100, None, lambda positions: positions + 7))
    table.remove(A, 50, None)
    assert time.perf_counter() - start < 1.0
