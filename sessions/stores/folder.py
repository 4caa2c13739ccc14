"""Small durable steps inside the folders of a disk store. Nothing here follows a symbolic link."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from engine.errors import StoreError, StoreFull, StoreUnavailable

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
TEMP_PREFIX = ".new-"


def disk_error(error: OSError, doing: str) -> StoreError:
    """The error of ours that says in one line what the system refused while `doing` something."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(f"{doing}: {reason.lower()}")
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return StoreUnavailable(f"{doing}: a folder of the store is a symbolic link or no folder; refused")
    return StoreUnavailable(f"{doing}: {reason.lower()}")


@contextlib.contextmanager
def disk_errors(doing: str) -> Iterator[None]:
    """Turns each OSError of its body into StoreFull or StoreUnavailable."""
    try:
        yield
    except OSError as error:
        raise disk_error(error, doing) from error


@contextlib.contextmanager
def opened_folder(name: str | Path, parent: int | None = None) -> Iterator[int]:
    """A file descriptor of a folder, closed at the end. A symbolic link is refused (ELOOP or ENOTDIR)."""
    fd = os.open(name, FOLDER_FLAGS, dir_fd=parent)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def locked(fd: int) -> Iterator[None]:
    """Holds an flock on an open folder: it keeps threads apart as well, since each opens its own,
    and it ends by itself with the process."""
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


@contextlib.contextmanager
def share_locked(fd: int) -> Iterator[None]:
    """The same, but beside other holders of this one; only `locked` keeps it out."""
    fcntl.flock(fd, fcntl.LOCK_SH)
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


def make_folders(path: Path) -> None:
    """Creates `path` and what it lies in, 0700 where new, each new one durable in its parent."""
    if path.is_dir():
        return
    make_folders(path.parent)
    make_folder(str(path))
    sync_folder(path.parent)


def make_folder(name: str, parent: int | None = None) -> bool:
    """A folder of mode 0700, unless one is there already. Returns whether it was made."""
    try:
        os.mkdir(name, 0o700, dir_fd=parent)
    except FileExistsError:
        return False
    return True


def sync_folder(path: Path) -> None:
    """fsync of a folder, so that the names in it survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: memoryview) -> None:
    """Every byte of `data`: a write may take fewer than it is given."""
    while data.nbytes:
        data = data[os.write(fd, data) :]


def write_temp(folder: int, data: memoryview, prefix: str = TEMP_PREFIX) -> str:
    """A new file in `folder` with `data`, 0600 and fsynced; its name. Leaves nothing after an error."""
    name = f"{prefix}{os.getpid()}-{secrets.token_hex(8)}"
    fd = os.open(name, _NEW_FILE, 0o600, dir_fd=folder)
    try:
        try:
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
    except BaseException:
        discard(name, folder)
        raise
    return name


def discard(name: str, folder: int) -> None:
    """Best effort: what cannot be unlinked now is a stray, which `sweep` finds."""
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder)
