"""Laws of the memory that decoding takes: what is taken stays apart until all of it is given back."""

from __future__ import annotations

import pytest

from serialization.buffers import Scratch, Spares


@pytest.mark.parametrize("room", [0, 100, 1000, 10_000])
def test_what_is_taken_does_not_overlap_whatever_room_there_is(room: int) -> None:
    scratch = Scratch(room)
    for _ in range(3):
        scratch.begin()
        taken = [scratch.take(nbytes) for nbytes in (130, 1, 0, 700, 64, 300)]
        for number, buffer in enumerate(taken):
            buffer[:] = number
        assert [len(buffer) for buffer in taken] == [130, 1, 0, 700, 64, 300]
        assert all((buffer == number).all() for number, buffer in enumerate(taken))


def test_what_was_given_back_is_taken_again() -> None:
    scratch = Scratch(1000)
    first = [scratch.take(nbytes) for nbytes in (100, 300)]
    scratch.begin()
    again = [scratch.take(nbytes) for nbytes in (100, 300)]
    assert [buffer.ctypes.data for buffer in again] == [buffer.ctypes.data for buffer in first]
    scratch.begin()
    assert scratch.take(1000).ctypes.data == first[0].ctypes.data, "all of it"


def test_spare_memory_is_lent_to_one_at_a_time_and_again_when_it_is_given_back() -> None:
    spares = Spares(1000)
    first, second = spares.lend(300), spares.lend(300)
    assert first is not second
    spares.give_back([first])
    assert spares.lend(301) is not first, "it has no room for so much"
    assert spares.lend(200) is first
    assert spares.lend(200) is not first


def test_what_is_given_back_twice_is_kept_once() -> None:
    spares = Spares(1000)
    scratch = spares.lend(100)
    spares.give_back([scratch, scratch])
    spares.give_back([scratch])
    assert spares.lend(100) is scratch
    assert spares.lend(100) is not scratch


def test_the_smallest_that_has_room_is_lent() -> None:
    spares = Spares(1000)
    small, large, middle = (spares.lend(nbytes) for nbytes in (100, 500, 300))
    spares.give_back([small, large, middle])
    assert [spares.lend(200), spares.lend(200), spares.lend(50)] == [middle, large, small]


def test_no_more_is_kept_than_the_budget_and_of_that_what_came_last() -> None:
    spares = Spares(500)
    first, second, third, huge = (spares.lend(nbytes) for nbytes in (200, 200, 250, 501))
    spares.give_back([first, second])
    spares.give_back([third])
    assert [spares.lend(150), spares.lend(150)] == [second, third]
    spares.give_back([huge])
    assert spares.lend(1) is not huge
