"""Canonical msgpack: one spelling for each value (docs/format.md, section 3).

The reader is our own because the library's allocates what a length field promises; this one believes a
length only as far as the bytes go.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

import msgpack

from engine.errors import Corrupt, LimitExceeded
from serialization.blobs import Bytes
from serialization.limits import MAX_DEPTH


def pack(value: object) -> bytes:
    """`value` in its one spelling: maps sorted by key, tuples as arrays."""
    packed: bytes = msgpack.packb(_sorted(value), use_bin_type=True)
    return packed


def unpack(data: Bytes, what: str) -> Any:
    """The value that `data` spells. Raises Corrupt if `data` is not exactly what `pack` writes,
    LimitExceeded if it nests too deeply. Arrays come back as lists."""
    reader = _Reader(bytes(data), what)
    value = reader.value(0)
    if reader.at != len(reader.data):
        raise Corrupt(f"{what}: bytes after the end")
    if pack(value) != reader.data:
        raise Corrupt(f"{what}: not in canonical form")
    return value


#: Most values by far, and asking whether one is a mapping takes long.
_LEAVES = frozenset({int, str, bytes, float, bool, type(None)})


def _sorted(value: object) -> object:
    if type(value) in _LEAVES:
        return value
    if isinstance(value, Mapping):
        # UTF-8 and code points sort alike
        return {key: _sorted(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [_sorted(item) for item in value]
    return value


#: first byte -> (what follows, kind)
_SIZED = {
    0xC4: (struct.Struct(">B"), "bin"),
    0xC5: (struct.Struct(">H"), "bin"),
    0xC6: (struct.Struct(">I"), "bin"),
    0xCA: (struct.Struct(">f"), "other"),
    0xCB: (struct.Struct(">d"), "real"),
    0xCC: (struct.Struct(">B"), "int"),
    0xCD: (struct.Struct(">H"), "int"),
    0xCE: (struct.Struct(">I"), "int"),
    0xCF: (struct.Struct(">Q"), "int"),
    0xD0: (struct.Struct(">b"), "int"),
    0xD1: (struct.Struct(">h"), "int"),
    0xD2: (struct.Struct(">i"), "int"),
    0xD3: (struct.Struct(">q"), "int"),
    0xD9: (struct.Struct(">B"), "str"),
    0xDA: (struct.Struct(">H"), "str"),
    0xDB: (struct.Struct(">I"), "str"),
    0xDC: (struct.Struct(">H"), "array"),
    0xDD: (struct.Struct(">I"), "array"),
    0xDE: (struct.Struct(">H"), "map"),
    0xDF: (struct.Struct(">I"), "map"),
}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


class _Reader:
    """Walks msgpack bytes from front to back; memory is a small multiple of the bytes there are."""

    def __init__(self, data: bytes, what: str) -> None:
        self.data = data
        self.at = 0
        self.what = what

    def take(self, nbytes: int) -> bytes:
        taken = self.data[self.at : self.at + nbytes]
        if len(taken) != nbytes:
            raise Corrupt(f"{self.what}: cut off")
        self.at += nbytes
        return taken

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise LimitExceeded(f"{self.what}: nested more than {MAX_DEPTH} deep")
        if self.at >= len(self.data):
            raise Corrupt(f"{self.what}: cut off")
        first = self.data[self.at]
        self.at += 1
        if first < 0x80:
            return first
        if 0xA0 <= first < 0xC0:
            return self.text(first & 0x1F)
        if first in _CONSTANTS:
            return _CONSTANTS[first]
        if first >= 0xE0:
            return first - 256
        if first < 0x90:
            return self.map(first & 0x0F, depth)
        if first < 0xA0:
            return self.array(first & 0x0F, depth)
        if first not in _SIZED:
            raise Corrupt(f"{self.what}: type {first:#x} is not of this format")
        layout, kind = _SIZED[first]
        (number,) = layout.unpack(self.take(layout.size))
        return self.sized(kind, number, depth)

    def sized(self, kind: str, number: Any, depth: int) -> Any:
        match kind:
            case "int":
                return number
            case "real":
                if math.isnan(number):
                    raise Corrupt(f"{self.what}: not a number")
                return number
            case "bin":
                return self.take(number)
            case "str":
                return self.text(number)
            case "array":
                return self.array(number, depth)
            case "map":
                return self.map(number, depth)
            case _:
                raise Corrupt(f"{self.what}: a real number that is not a float64")

    def text(self, nbytes: int) -> str:
        try:
            return self.take(nbytes).decode("utf-8")
        except UnicodeDecodeError as error:
            raise Corrupt(f"{self.what}: text that is not UTF-8") from error

    def array(self, count: int, depth: int) -> list[Any]:
        return [self.value(depth + 1) for _ in range(count)]

    def map(self, count: int, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(count):
            key = self.value(depth + 1)
            if not isinstance(key, str):
                raise Corrupt(f"{self.what}: a key that is not text")
            found[key] = self.value(depth + 1)  # a key twice does not survive the comparison
        return found
