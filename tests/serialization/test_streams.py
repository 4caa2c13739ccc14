"""Laws of the memory that decoding takes: what is taken stays apart until all of it is given back."""

from __future__ import annotations

import pytest

from serialization.streams import Scratch


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
