"""A key file is its owner's alone, whole or refused, and what it had before is overwritten."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.errors import KeyFileRefused, StoreFull
from sessions.keyring import private
from sessions.keyring.private import read_given, read_private, remove_private, replace_private, signature
from tests.faults import IoFaults


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def test_what_was_written_is_read_by_its_owner_alone(path: Path) -> None:
    assert read_private(path) is None
    replace_private(path, b"secret")
    assert read_private(path) == read_given(path) == b"secret"
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601, 0o644, 0o777])
def test_a_file_that_others_can_reach_is_refused(path: Path, mode: int) -> None:
    replace_private(path, b"secret")
    path.chmod(mode)
    for read in (read_private, read_given):
        with pytest.raises(KeyFileRefused, match="chmod 600"):
            read(path)
    path.chmod(0o400)
    assert read_private(path) == b"secret"


def test_our_own_files_are_no_links_and_a_given_one_may_be(path: Path, tmp_path: Path) -> None:
    replace_private(path, b"secret")
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(KeyFileRefused, match="symbolic link"):
        read_private(link)
    assert read_given(link) == b"secret"


def test_what_is_no_file_is_refused(path: Path, tmp_path: Path) -> None:
    os.mkfifo(path, 0o600)
    for read in (read_private, read_given):
        with pytest.raises(KeyFileRefused, match="no file"):
            read(path)
    with pytest.raises(KeyFileRefused, match="not there"):
        read_given(tmp_path / "nothing")


def test_a_file_too_large_is_refused_before_it_is_read(path: Path) -> None:
    replace_private(path, b"x")
    os.truncate(path, private.MAX_NBYTES + 1)
    with pytest.raises(KeyFileRefused, match="too large"):
        read_private(path)


def test_what_was_replaced_or_removed_is_overwritten(path: Path) -> None:
    replace_private(path, b"the old secret")
    held = os.open(path, os.O_RDONLY)
    before = signature(path)
    replace_private(path, b"the new one")
    assert signature(path) != before
    assert os.pread(held, 100, 0) not in (b"the old secret", b"")
    os.close(held)
    held = os.open(path, os.O_RDONLY)
    assert remove_private(path)
    assert b"new one" not in os.pread(held, 100, 0)
    os.close(held)
    assert not remove_private(path)
    assert list(path.parent.iterdir()) == []


def test_whichever_step_of_a_replacement_fails_one_of_both_is_whole(path: Path) -> None:
    faults, nth, old, seen = IoFaults(), 0, b"0" * 40, set()
    replace_private(path, old)
    with faults.installed():
        while True:
            new = b"%d" % (nth + 1) * 40
            faults.arm(nth, 28)  # ENOSPC
            failed = False
            try:
                replace_private(path, new)
            except StoreFull:
                failed = True
            faults.disarm()
            if faults.fired is None:
                break
            found = read_private(path)
            assert found in (old, new) if failed else found == new, (nth, faults.fired)
            seen.add((failed, found == new))
            assert found is not None
            old, nth = found, nth + 1
    assert read_private(path) == new
    assert [each.name for each in path.parent.iterdir()] == ["keys"]
    assert (True, False) in seen


def test_what_a_crash_left_is_overwritten_by_the_next_change(path: Path) -> None:
    """Between the new name and the end of the old content, and before the new name."""
    replace_private(path, b"the first secret")
    left = path.parent / ".tenuto-keys-old-1"
    left.write_bytes(b"an older secret")
    left.chmod(0o600)
    same = path.parent / ".tenuto-keys-old-2"
    os.link(path, same)
    held = [os.open(each, os.O_RDONLY) for each in (left, path)]
    replace_private(path, b"the second")
    assert read_private(path) == b"the second"
    assert [each.name for each in path.parent.iterdir()] == ["keys"]
    assert all(b"secret" not in os.pread(fd, 100, 0) for fd in held)
    for fd in held:
        os.close(fd)


def test_a_second_name_left_by_a_crash_never_costs_the_file(path: Path) -> None:
    replace_private(path, b"in use")
    os.link(path, path.parent / ".tenuto-keys-old-1")
    assert not remove_private(path.parent / "other")
    with private.opened_folder(path.parent) as folder:
        private.shred_left(folder)
    assert read_private(path) == b"in use"


def test_files_of_others_in_the_folder_are_left_alone(path: Path) -> None:
    for name in (".old-x", ".new-1-2", "old", ".tenuto"):
        (path.parent / name).write_bytes(b"mine")
    replace_private(path, b"1")
    replace_private(path, b"2")
    assert sorted(each.name for each in path.parent.iterdir()) == sorted(
        [".old-x", ".new-1-2", "old", ".tenuto", "keys"]
    )
