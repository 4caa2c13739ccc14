"""A file that appears whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from engine.errors import UsageError


@contextmanager
def replacing(target: Path, force: bool = False) -> Iterator[BinaryIO]:
    """A file beside `target` that takes its place at the end; on an error nothing is left behind.

    Raises UsageError when `target` exists and `force` was not said, OSError as the system has it.
    """
    if target.exists() and not force:
        raise UsageError(f"{target} exists already; --force overwrites it")
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
