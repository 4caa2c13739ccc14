"""Every kind of file that is read here, in one table: which it is, and how it is read."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from io import FileIO
from pathlib import Path

from engine.errors import Corrupt, LimitExceeded, StateError, UnknownFormat, UsageError
from serialization.foreign.detect import read_llama, sniff
from serialization.foreign.foreign_state import ForeignState
from serialization.foreign.geometry import Geometry
from serialization.foreign.mlx import read_mlx
from serialization.foreign.mlx_tree import layout_of
from serialization.foreign.refused import DISKCACHE_INDEX, FIRST_NBYTES, refused_file, refused_folder
from serialization.foreign.tensor_file import (
    MAX_HEADER_NBYTES,
    PREFIX_NBYTES,
    begins_tensor_file,
    read_metadata,
)
from serialization.foreign.torch_dump import is_torch_dump, read_torch_dump

#: No file is read that is larger.
MAX_FILE_NBYTES = 2**36

_STEP = 2**24


class Kind(StrEnum):
    """What wrote a file."""

    LLAMA_CPP = "llama.cpp"
    MLX = "mlx-lm"
    TRANSFORMERS = "transformers"


@dataclass(frozen=True, slots=True)
class Asked:
    """What the caller says of a file: the model's geometry, which of its sequences is meant, and token ids
    for a file that has none."""

    geometry: Geometry
    sequence: int | None = None
    tokens: Sequence[int] | None = None


Read = Callable[[bytearray, Asked], ForeignState]


@dataclass(frozen=True, slots=True)
class Reader:
    """`fits`: whether a file that begins so is of this kind. `read` raises a StateError, or UsageError for a
    sequence that the file does not hold."""

    kind: Kind
    fits: Callable[[bytes], bool]
    read: Read


def _read_llama(data: bytearray, asked: Asked) -> ForeignState:
    state = read_llama(data, asked.geometry, asked.sequence)
    if state.tokens is None and asked.tokens is not None:
        return replace(state, tokens=tuple(asked.tokens))
    return state


def _one_sequence(read: Callable[[memoryview, Geometry, Sequence[int] | None], ForeignState]) -> Read:
    """A reader of files that hold one sequence, which has no number."""

    def read_one(data: bytearray, asked: Asked) -> ForeignState:
        if asked.sequence is not None:
            raise UsageError(f"the file holds one sequence, and none has the number {asked.sequence}")
        return read(memoryview(data), asked.geometry, asked.tokens)

    return read_one


READERS: tuple[Reader, ...] = (
    Reader(Kind.LLAMA_CPP, sniff, _read_llama),
    Reader(
        Kind.MLX,
        lambda first: begins_tensor_file(first) and layout_of(read_metadata(first)) is not None,
        _one_sequence(read_mlx),
    ),
    Reader(
        Kind.TRANSFORMERS,
        lambda first: begins_tensor_file(first) and is_torch_dump(read_metadata(first)),
        _one_sequence(read_torch_dump),
    ),
)


def kind_of(path: Path) -> Kind:
    """Which kind of file it is. Raises UnknownFormat for one that is none, or never opened (with what to do),
    Corrupt where it begins as one and is none, and UsageError where there is no file that can be read."""
    with _opened(path) as file:
        return _reader(path, file).kind


def read_foreign(
    path: Path,
    geometry: Geometry,
    *,
    sequence: int | None = None,
    tokens: Sequence[int] | None = None,
    kind: Kind | None = None,
    limit: int = MAX_FILE_NBYTES,
) -> ForeignState:
    """The state that a file holds, of a model of this geometry. `kind` is for a file whose first bytes do not
    tell: a bare state of llama.cpp's memory.

    It is read into memory once, as one that is mapped would end the process if another cut it. Raises as
    `kind_of`, and a StateError that says what is wrong: LimitExceeded for more than `limit` bytes.
    """
    asked = Asked(geometry, sequence, tokens)
    with _opened(path) as file:
        reader = _reader(path, file) if kind is None else _BY_KIND[kind]
        data = _whole(path, file, limit)
    try:
        return read_bytes(data, asked, reader.kind)
    except StateError as error:
        raise type(error)(f"{path}: {error}", **error.details) from error


def read_bytes(data: bytearray, asked: Asked, kind: Kind) -> ForeignState:
    """The state that the bytes of a file hold. Raises as a `Reader`."""
    return _BY_KIND[kind].read(data, asked)


_BY_KIND = {reader.kind: reader for reader in READERS}


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A descriptor of an ordinary file. Nothing waits: a pipe is refused and not read from."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"{path}: {(error.strerror or str(error)).lower()}") from error
    try:
        mode = os.fstat(file).st_mode
        if stat.S_ISDIR(mode):
            raise UnknownFormat(f"{path}: {refused_folder(_index_of(file))}")
        if not stat.S_ISREG(mode):
            raise UnknownFormat(f"{path}: this is no ordinary file")
        yield file
    finally:
        os.close(file)


def _index_of(folder: int) -> bytes | None:
    """The first bytes of a folder's `cache.db`, if that is an ordinary file."""
    try:
        file = os.open(DISKCACHE_INDEX, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return None
    try:
        return os.pread(file, FIRST_NBYTES, 0) if stat.S_ISREG(os.fstat(file).st_mode) else None
    finally:
        os.close(file)


def _reader(path: Path, file: int) -> Reader:
    first = os.pread(file, FIRST_NBYTES, 0)
    if begins_tensor_file(first):  # asked first: the length of its header may begin as a pickle does
        first = os.pread(file, PREFIX_NBYTES + MAX_HEADER_NBYTES, 0)
    elif (refusal := refused_file(first)) is not None:
        raise UnknownFormat(f"{path}: {refusal}")
    for reader in READERS:
        if reader.fits(first):
            return reader
    if begins_tensor_file(first):
        raise UnknownFormat(
            f"{path}: a safetensors file that is neither a prompt cache of mlx-lm nor a dump of transformers"
        )
    raise UnknownFormat(f"{path}: its first bytes are those of no file that is read here")


def _whole(path: Path, file: int, limit: int) -> bytearray:
    size = os.fstat(file).st_size
    if size > limit:
        raise LimitExceeded(
            f"{path}: {size:,} bytes are more than the {limit:,} allowed", value=size, limit=limit
        )
    data = bytearray(size)
    view, at = memoryview(data), 0
    with FileIO(file, closefd=False) as whole:
        while at < size and (count := whole.readinto(view[at : at + _STEP])):
            at += count
    if at < size or os.pread(file, 1, size):
        raise Corrupt(f"{path}: it was changed while it was read")
    return data
