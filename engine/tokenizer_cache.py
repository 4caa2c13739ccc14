"""Built tokenizers on disk: a file per vocabulary, believed only when its own digest fits.

    line 1   "tenuto tokenizer <build> b3-<64 hex>\n": the digest is over all that follows
    rest     the JSON of the `tokenizers` library

A file that is damaged, or of another build, is made anew; it is a cache, so nothing is lost or reported.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3
from tokenizers import Tokenizer

#: Part of the file's name; raise it whenever `tokenizer_build` makes something else of the same vocabulary.
_BUILD = 1
_MAX_NBYTES = 256 * 2**20


def cached(folder: Path | None, digest: str, build: Callable[[], Tokenizer]) -> Tokenizer:
    """`build()`, or its result of an earlier time. A folder that cannot be written to is no error."""
    if folder is None:
        return build()
    path = folder / f"{digest}.{_BUILD}.tokenizer.json"
    known = _read(path)
    if known is not None:
        return known
    built = build()
    with contextlib.suppress(OSError):
        _write(path, built.to_str().encode())
    return built


def _read(path: Path) -> Tokenizer | None:
    try:
        if path.stat().st_size > _MAX_NBYTES:
            return None
        head, _, body = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    if head != _head(body):
        return None
    try:
        return Tokenizer.from_buffer(body)
    except Exception:  # the library raises bare Exception where another release of it wrote the file
        return None


def _head(body: bytes) -> bytes:
    return f"tenuto tokenizer {_BUILD} b3-{blake3(body).hexdigest()}".encode()


def _write(path: Path, body: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_head(body) + b"\n" + body)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
