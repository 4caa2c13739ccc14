"""A temporary file is nobody else's, holds what was put into it, and says when it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import StoreFull, StoreUnavailable
from sessions.scratch import Rows, Scratch, Seen


def test_what_is_put_in_is_found_again_more_than_fits_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQLITE_TMPDIR", str(tmp_path))
    with Scratch("CREATE TABLE t (number INT, text TEXT)") as scratch:
        scratch.do_many("INSERT INTO t VALUES (?, ?)", ((n, "x" * 1000) for n in range(8000)))
        assert list(tmp_path.iterdir()) == []  # no name leads to it
        assert scratch.number("SELECT SUM(number) FROM t") == sum(range(8000))
        numbers = Rows(scratch, "SELECT number FROM t WHERE number > 7990 ORDER BY number", int)
        assert (len(numbers), list(numbers), 7995 in numbers, 3 in numbers) == (
            9,
            list(range(7991, 8000)),
            True,
            False,
        )
        assert list(numbers) == list(numbers)


def test_nothing_is_a_number_too() -> None:
    with Scratch("CREATE TABLE t (number INT)") as scratch:
        assert scratch.number("SELECT SUM(number) FROM t") == 0
        assert scratch.row("SELECT number FROM t") is None


def test_a_text_is_new_once() -> None:
    with Seen() as seen:
        assert [seen.add(text) for text in "abab"] == [True, True, False, False]


def test_a_full_disk_is_no_room_and_a_broken_file_is_told() -> None:
    with Scratch("CREATE TABLE t (text TEXT)") as scratch:
        scratch.do("PRAGMA max_page_count = 4")
        with pytest.raises(StoreFull):
            scratch.do_many("INSERT INTO t VALUES (?)", (("x" * 4000,) for _ in range(20)))
        with pytest.raises(StoreUnavailable):
            scratch.do("no statement")
