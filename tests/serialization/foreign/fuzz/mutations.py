"""Bytes that were good once, changed in the ways in which files are wrong: by chance, and by malice."""

from __future__ import annotations

import json
import random
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

#: Numbers at which sizes and offsets go wrong.
_NUMBERS = (0, 1, 2, 3, 7, 8, 31, 32, 255, 256, 2**15, 2**16, 2**24, 2**30, 2**31 - 1, 2**31, 2**32 - 1)
_LONG = (*_NUMBERS, 2**32, 2**40, 2**48, 2**62, 2**63 - 1, 2**64 - 1)

#: Words of headers and of what they say.
_WORDS = (
    *(b"", b"0", b"1", b"-1", b"[]", b"{}", b"null", b"true", b"1e9", b"NaN", b"999999999999999", b"\\u0000"),
    *(b"F16", b"F32", b"BF16", b"U32", b"I64", b"BOOL", b"F8_E4M3", b"shape", b"dtype", b"data_offsets"),
    *(
        b"__metadata__",
        b"KVCache",
        b"RotatingKVCache",
        b"QuantizedKVCache",
        b"ChunkedKVCache",
        b"ArraysCache",
    ),
    *(
        b"MambaCache",
        b"CacheList",
        b"BatchKVCache",
        b"scalar",
        b"string",
        b"none",
        b"full",
        b"sliding",
        b"linear",
    ),
    *(
        b"linear+full",
        b"indexed",
        b"0.0",
        b"0.keys",
        b"0.values",
        b"0.state",
        b"0.conv.0",
        b"tokens",
        b"os.system",
    ),
)

_NUMBER_IN_TEXT = re.compile(rb"\d+")
_WORD_IN_TEXT = re.compile(rb'"[^"]{0,40}"')

Mutation = Callable[[random.Random, bytearray, Sequence[bytes]], None]


def mutated(draw: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """One file with one to eight changes; `others` are what parts may be taken from."""
    changed = bytearray(data)
    kinds = _MUTATIONS if data[8:9] == b"{" else _OF_BYTES
    for _ in range(draw.choice((1, 1, 1, 2, 2, 3, 5, 8))):
        draw.choice(kinds)(draw, changed, others)
    return bytes(changed[: max(2 * len(data), 2**16)])


def _place(draw: random.Random, data: bytearray) -> int:
    """Anywhere; half of the times near the beginning, where files say what they are."""
    end = len(data) + 1
    return draw.randrange(min(end, draw.choice((16, 64, 512, 2048, end, end, end, end))))


def _flip(draw: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    if data:
        data[_place(draw, data) % len(data)] ^= 1 << draw.randrange(8)


def _byte(draw: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    if data:
        data[_place(draw, data) % len(data)] = draw.randrange(256)


def _number(draw: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    """A number of 4 or 8 bytes, mostly at a place where there may be one."""
    at = _place(draw, data) // 4 * 4
    packed = struct.pack("<I", draw.choice(_NUMBERS))
    if draw.random() < 0.3:
        packed = struct.pack("<Q", draw.choice(_LONG))
    data[at : at + len(packed)] = packed


def _nudge(draw: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    """A number of 4 bytes, a little more or less than it was."""
    at = _place(draw, data) // 4 * 4
    if at + 4 <= len(data):
        value = int.from_bytes(data[at : at + 4], "little") + draw.choice((-2, -1, 1, 2, 16, -16))
        data[at : at + 4] = (value % 2**32).to_bytes(4, "little")


def _cut(draw: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    del data[_place(draw, data) :]


def _drop(draw: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    at = _place(draw, data)
    del data[at : at + draw.choice((1, 2, 4, 4, 8, 12, 64))]


def _repeat(draw: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    at, count = _place(draw, data), draw.choice((1, 4, 4, 8, 12, 64))
    data[at:at] = data[at : at + count] * draw.choice((1, 1, 2, 16))


def _insert(draw: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    at = _place(draw, data)
    data[at:at] = draw.randbytes(draw.choice((1, 2, 4, 8, 64)))


def _splice(draw: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    """A part of another file, or all behind a place of it."""
    other = draw.choice(others)
    start, at = draw.randrange(len(other) + 1), _place(draw, data)
    if draw.random() < 0.5:
        count = draw.choice((4, 8, 64, 512))
        data[at : at + count] = other[start : start + count]
    else:
        data[at:] = other[start:]


def _digits(draw: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    """Another number in a text."""
    found = _found(draw, _NUMBER_IN_TEXT, data)
    if found is not None:
        value = int(found.group()[:18]) + draw.choice((-8, -1, 1, 2, 8, 64))
        text = draw.choice((str(max(0, value)), str(draw.choice(_LONG)), "-1", "00", "9" * 30))
        data[found.start() : found.end()] = text.encode()


def _word(draw: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    """Another word in a text."""
    found = _found(draw, _WORD_IN_TEXT, data)
    if found is not None:
        word = draw.choice(
            (*_WORDS, *[each.group()[1:-1] for each in _WORD_IN_TEXT.finditer(bytes(data[:2048]))])
        )
        data[found.start() + 1 : found.end() - 1] = word


def _header(draw: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    """Mends the length of a safetensors header, so that what was changed in it is looked at."""
    end = bytes(data[: 2**16]).rfind(b"}")
    if end >= 8:
        while data[end + 1 : end + 2] == b" ":
            end += 1
        data[:8] = (end - 7).to_bytes(8, "little")


def _found(draw: random.Random, pattern: re.Pattern[bytes], data: bytearray) -> re.Match[bytes] | None:
    all_ = list(pattern.finditer(bytes(data[:8192])))
    return draw.choice(all_) if all_ else None


def _text(draw: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    """Several changes in a header, whose length is mended."""
    for _ in range(draw.choice((1, 1, 2, 3))):
        draw.choice((_digits, _word))(draw, data, others)
    _header(draw, data, others)


def _tree(draw: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    """A safetensors header with a thing in it changed, and exact all the same: wrong is what it says."""
    length = int.from_bytes(data[:8], "little")
    try:
        tree = json.loads(bytes(data[8 : 8 + length]))
        said = tree.pop("__metadata__", None) or {}
        names = [name for name in tree if isinstance(tree[name]["shape"], list)]
        draw.choice(_TREE)(draw, tree, said, names)
        header = json.dumps({"__metadata__": said, **tree}).encode()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return
    data[: 8 + length] = len(header).to_bytes(8, "little") + header


Tree = dict[str, Any]


def _tree_shape(draw: random.Random, tree: Tree, said: Tree, names: list[str]) -> None:
    """The same number of values in another shape."""
    shape = tree[draw.choice(names)]["shape"]
    kind = draw.randrange(4)
    if kind == 0:
        draw.shuffle(shape)
    elif kind == 1:
        shape.insert(draw.randrange(len(shape) + 1), 1)
    elif kind == 2 and 1 in shape:
        shape.remove(1)
    else:
        at, other = draw.randrange(len(shape)), draw.randrange(len(shape))
        factor = draw.choice((2, 4, 8))
        if shape[at] % factor == 0 and at != other:
            shape[at] //= factor
            shape[other] *= factor


def _tree_dtype(draw: random.Random, tree: Tree, said: Tree, names: list[str]) -> None:
    """Another dtype, mostly of the same size."""
    sizes = (
        ("F16", "BF16", "I16", "U16"),
        ("F32", "I32", "U32"),
        ("F64", "I64", "U64"),
        ("U8", "I8", "BOOL"),
    )
    entry = tree[draw.choice(names)]
    entry["dtype"] = draw.choice(next((each for each in sizes if entry["dtype"] in each), draw.choice(sizes)))


def _tree_name(draw: random.Random, tree: Tree, said: Tree, names: list[str]) -> None:
    """Two names exchanged, or a name at another place."""
    one, other = draw.choice(names), draw.choice(names)
    if draw.random() < 0.5:
        tree[one], tree[other] = tree[other], tree[one]
    else:
        tree[draw.choice((f"{one}.0", one[:-1], one[2:], f"{draw.randrange(4)}{one[1:]}"))] = tree.pop(one)


def _tree_said(draw: random.Random, tree: Tree, said: Tree, names: list[str]) -> None:
    """Metadata: a value of another, a name of another, a number, or one that is gone."""
    one, other = draw.choice(list(said)), draw.choice(list(said))
    kind = draw.randrange(5)
    if kind == 0:
        said[one], said[other] = said[other], said[one]
    elif kind == 1:
        said[draw.choice((f"{one}.0", f"{one[:-1]}{draw.randrange(9)}"))] = said[other]
    elif kind == 2:
        said[one] = draw.choice((str(draw.randrange(40)), str(draw.choice(_LONG)), *names[:3]))
    elif kind == 3:
        del said[one]
    else:
        said[one] = draw.choice(_WORDS).decode()


_TREE = (_tree_shape, _tree_shape, _tree_dtype, _tree_name, _tree_said, _tree_said, _tree_said)

_OF_BYTES: tuple[Mutation, ...] = (
    *(_flip, _byte, _number, _number, _nudge, _nudge, _cut, _drop, _repeat, _insert, _splice),
)
_MUTATIONS = (*_OF_BYTES, _digits, _word, _header, _text, _text, *(_tree,) * 12)
