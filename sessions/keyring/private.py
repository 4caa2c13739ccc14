"""Small files of secrets: their owner's alone, whole or refused, replaced in one step and then overwritten.

Whoever replaces or removes one holds the exclusive lock of its folder (or of a folder above).
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path

from engine.errors import KeyFileRefused
from sessions.stores.folder import discard, disk_errors, opened_folder, write_all, write_temp

MAX_NBYTES = 2**24

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
#: Names that nobody else gives a file, since a person may keep a key file in any folder.
_NEW_PREFIX = ".tenuto-keys-new-"
_OLD_PREFIX = ".tenuto-keys-old-"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO

Signature = tuple[int, int, int, int]


def read_private(path: Path) -> bytes | None:
    """What is in the file, None where there is none. A symbolic link is refused: these files are ours.

    Raises KeyFileRefused for one that others may read or write, or that is no file; StoreUnavailable.
    """
    with disk_errors(f"reading the key file {path}"):
        try:
            return _read(os.open(path, _READ | os.O_NOFOLLOW), path)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise KeyFileRefused(
                    f"the key file {path} is a symbolic link, which is not followed"
                ) from None
            raise


def read_given(path: Path) -> bytes:
    """The same of a file that a person named: it must be there, and links are followed."""
    with disk_errors(f"reading the key file {path}"):
        try:
            return _read(os.open(path, _READ), path)
        except FileNotFoundError:
            raise KeyFileRefused(f"the key file {path} is not there") from None


def _read(fd: int, path: Path) -> bytes:
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise KeyFileRefused(f"the key file {path} is no file")
        if found.st_mode & _OTHERS:
            raise KeyFileRefused(
                f"others may read or write the key file {path} (mode {stat.S_IMODE(found.st_mode):04o}): "
                "make it yours alone with chmod 600"
            )
        if found.st_uid not in (os.geteuid(), 0):
            raise KeyFileRefused(f"the key file {path} belongs to another user")
        if found.st_size > MAX_NBYTES:
            raise KeyFileRefused(f"the key file {path} is too large to be one")
        with open(fd, "rb", closefd=False) as file:
            return file.read(MAX_NBYTES)
    finally:
        os.close(fd)


def signature(path: Path) -> Signature | None:
    """Differs after each replacement of the file; None where there is none."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns


def replace_private(path: Path, data: bytes) -> None:
    """The file has `data` from now on, durably, or after a crash what it had before; that is overwritten.

    Raises StoreFull, StoreUnavailable; then it has what it had.
    """
    with disk_errors(f"writing the key file {path}"), opened_folder(path.parent) as folder:
        shred_left(folder)
        temp = write_temp(folder, memoryview(data), _NEW_PREFIX)
        try:
            with contextlib.suppress(FileNotFoundError):
                _set_aside(folder, path.name)
            os.rename(temp, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            discard(temp, folder)
            raise
        os.fsync(folder)
        shred_left(folder)


def remove_private(path: Path) -> bool:
    """Overwrites and removes the file. Returns whether there was one."""
    with disk_errors(f"removing the key file {path}"), opened_folder(path.parent) as folder:
        try:
            os.rename(path.name, _old_name(), src_dir_fd=folder, dst_dir_fd=folder)
        except FileNotFoundError:
            return False
        os.fsync(folder)
        shred_left(folder)
        return True


def shred_left(folder: int) -> None:
    """Overwrites and unlinks what replaced files left in the open `folder`, also those of a process that
    ended in the middle of it."""
    for name in os.listdir(folder):
        if name.startswith((_OLD_PREFIX, _NEW_PREFIX)):
            _shred(folder, name)


def _set_aside(folder: int, name: str) -> None:
    """A second name for the file, by which it is found and overwritten even after a crash."""
    os.link(name, _old_name(), src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)


def _old_name() -> str:
    return f"{_OLD_PREFIX}{secrets.token_hex(8)}"


def _shred(folder: int, name: str) -> None:
    fd = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        found = os.fstat(fd)
        # With another name left it is still in use: its replacement never took place.
        if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
            write_all(fd, memoryview(os.urandom(found.st_size)))
            os.fsync(fd)
    finally:
        os.close(fd)
    os.unlink(name, dir_fd=folder)
