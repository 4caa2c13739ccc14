"""A file that appears whole or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from engine.errors import StoreFull, UsageError


def named_file(text: str) -> Path:
    """The path that a user wrote, `~` being a home folder. Raises UsageError for what cannot be a path."""
    if "\0" in text:
        raise UsageError("a path has no NUL character")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # ~somebody, who is not there
        raise UsageError(f"{text}: {error}") from error


@contextmanager
def replacing(target: Path, force: bool = False) -> Iterator[BinaryIO]:
    """A file beside `target` that takes its place at the end; on an error nothing is left behind.

    Raises UsageError when `target` exists and `force` was not said, or is no regular file (a device must not
    be replaced by one), or its folder is not there; StoreFull; OSError as the system has it.
    """
    if target.exists() and not target.is_file():
        raise UsageError(f"{target} is no regular file")
    if target.exists() and not force:
        raise UsageError(f"{target} exists already; --force overwrites it")
    if not target.parent.is_dir():
        raise UsageError(f"{target}: there is no folder {target.parent}")
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        Path(name).replace(target)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(f"{target}: no room is left for it") from error
        raise
