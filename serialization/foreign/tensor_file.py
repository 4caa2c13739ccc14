"""A safetensors file: a header of JSON that is believed only where it is exact, and the bytes of tensors.

Read by ourselves and not by the library: a header is bounded before it is parsed, so that no file costs more
memory than a few times its size, and tensors are views of the bytes that were read. What the library refuses
is refused here too (a test compares the two).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import Corrupt, LimitExceeded, UnknownFeature

Array = npt.NDArray[Any]

#: The length of the header comes first.
PREFIX_NBYTES = 8

#: Of a header, and of the values in it: a cache of 128 layers, each of nine tensors, has 0.1 MB and 12,000.
MAX_HEADER_NBYTES = 2**20
MAX_HEADER_VALUES = 2**16

_MAX_AXES = 8
_MAX_SIZE = 2**48

#: How values are read: bfloat16 as its bits.
_DTYPES: Mapping[str, str] = {
    "BOOL": "|u1",
    "U8": "|u1",
    "I8": "|i1",
    "U16": "<u2",
    "I16": "<i2",
    "U32": "<u4",
    "I32": "<i4",
    "U64": "<u8",
    "I64": "<i8",
    "F16": "<f2",
    "BF16": "<u2",
    "F32": "<f4",
    "F64": "<f8",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: its dtype by safetensors' name, its shape, and where its bytes are among the data."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A file that is exact: tensors cover its data without a gap or an overlap."""

    metadata: Mapping[str, str]
    entries: Mapping[str, Entry]
    data: memoryview

    def array(self, name: str) -> Array:
        """A view of one tensor, perhaps unaligned. The name must be there."""
        entry = self.entries[name]
        flat = np.frombuffer(self.data[entry.start : entry.stop], np.uint8)
        return flat.view(_DTYPES[entry.dtype]).reshape(entry.shape)


def begins_tensor_file(first: bytes) -> bool:
    """Whether these first bytes of a file may be those of a safetensors file."""
    length = int.from_bytes(first[:PREFIX_NBYTES], "little")
    return (
        len(first) > PREFIX_NBYTES and 2 <= length <= MAX_HEADER_NBYTES and first[PREFIX_NBYTES] == ord("{")
    )


def read_metadata(first: bytes) -> Mapping[str, str]:
    """What a file whose first bytes hold all of its header says of itself. Raises as `read_tensor_file`."""
    return _split(_parse(_header(memoryview(first))))[0]


def read_tensor_file(buffer: memoryview) -> TensorFile:
    """The file that these bytes are; its tensors are views of them.

    Raises Corrupt where it is not exact, LimitExceeded for a header beyond the limits, and UnknownFeature
    for a dtype that is none of those above.
    """
    header = _header(buffer)
    metadata, tensors = _split(_parse(header))
    data = buffer[PREFIX_NBYTES + len(header) :]
    entries = {name: _entry(name, said) for name, said in tensors.items()}
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != at:
            raise Corrupt(
                f"tensor {quoted(name)} begins at {entry.start:,} and not at {at:,}, where the last ends"
            )
        at = entry.stop
    if at != len(data):
        raise Corrupt(f"tensors end at {at:,}, and the file has {len(data):,} bytes of them")
    return TensorFile(metadata, entries, data)


def write_tensor_file(
    arrays: Mapping[str, tuple[str, Array]], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """The same bytes for the same values: a header, then tensors in the order given, each (dtype, values)."""
    said: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name, (dtype, array) in arrays.items():
        said[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    header = json.dumps(said, ensure_ascii=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % PREFIX_NBYTES)  # tensors begin aligned
    yield len(header).to_bytes(PREFIX_NBYTES, "little") + header
    for _, array in arrays.values():
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _header(buffer: memoryview) -> bytes:
    if len(buffer) < PREFIX_NBYTES:
        raise Corrupt(f"a safetensors file has {PREFIX_NBYTES} bytes at least, and this has {len(buffer)}")
    length = int.from_bytes(buffer[:PREFIX_NBYTES], "little")
    if length > len(buffer) - PREFIX_NBYTES:
        raise Corrupt(
            f"the header should have {length:,} bytes, and {len(buffer) - PREFIX_NBYTES:,} are there"
        )
    if length > MAX_HEADER_NBYTES:
        raise LimitExceeded(f"a header of {length:,} bytes is more than the {MAX_HEADER_NBYTES:,} allowed")
    header = bytes(buffer[PREFIX_NBYTES : PREFIX_NBYTES + length])
    # Every value of a header but the first stands behind one of these: what parsing costs is known before.
    if header.count(b",") + header.count(b"[") + header.count(b"{") > MAX_HEADER_VALUES:
        raise LimitExceeded(f"a header has more than the {MAX_HEADER_VALUES:,} values allowed")
    return header


def _parse(header: bytes) -> dict[str, object]:
    try:
        tree = json.loads(
            header.decode(),
            object_pairs_hook=_unique,
            parse_int=_integer,
            parse_float=_no_number,
            parse_constant=_no_number,
        )
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"the header is not JSON: {type(error).__name__}") from error
    if not isinstance(tree, dict) or not header.startswith(b"{"):
        raise Corrupt("the header is not a JSON object")
    return tree


def _unique(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        raise Corrupt("the header has a name twice")
    return tree


def _integer(digits: str) -> int:
    if len(digits) > 15:
        raise Corrupt("the header has a number that no file could have")
    return int(digits)


def _no_number(said: str) -> object:
    raise Corrupt(f"the header has {said[:20]} for a number")


def _split(tree: dict[str, object]) -> tuple[dict[str, str], dict[str, object]]:
    said = tree.pop("__metadata__", None)
    if said is None:  # mlx writes null where there is none
        said = {}
    if not isinstance(said, dict):
        raise Corrupt("the file's metadata is not an object")
    metadata: dict[str, str] = {}
    for name, value in said.items():
        if not isinstance(value, str):
            raise Corrupt(f"metadata {quoted(name)} is not text")
        metadata[name] = value
    return metadata, tree


def _entry(name: str, said: object) -> Entry:
    if not isinstance(said, dict) or said.keys() != {"dtype", "shape", "data_offsets"}:
        raise Corrupt(f"tensor {quoted(name)} is not said by dtype, shape and data_offsets")
    dtype = said["dtype"]
    if not isinstance(dtype, str):
        raise Corrupt(f"tensor {quoted(name)} has no dtype")
    if dtype not in _DTYPES:
        raise UnknownFeature(f"tensor {quoted(name)} is of a dtype that is not read: {quoted(dtype)}")
    shape = _sizes(name, said["shape"], _MAX_AXES)
    offsets = _sizes(name, said["data_offsets"], 2)
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise Corrupt(f"tensor {quoted(name)} has no place among the data")
    nbytes = math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize
    if nbytes != offsets[1] - offsets[0]:
        raise Corrupt(
            f"tensor {quoted(name)} has {offsets[1] - offsets[0]:,} bytes, and its shape {nbytes:,}"
        )
    return Entry(dtype, shape, *offsets)


def _sizes(name: str, said: object, most: int) -> tuple[int, ...]:
    if not isinstance(said, list) or len(said) > most:
        raise Corrupt(f"tensor {quoted(name)}: its shape or place is no list of {most} sizes at most")
    for size in said:
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= _MAX_SIZE:
            raise Corrupt(f"tensor {quoted(name)} has a size that no tensor has")
    return tuple(said)


def quoted(text: str) -> str:
    """A stranger's word in one line for people."""
    return ascii(text[:60])
