"""A safetensors header is believed where it is exact; what the library refuses is refused here too."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors
from safetensors.numpy import save

from engine.errors import Corrupt, LimitExceeded, StateError, UnknownFeature
from serialization.foreign.tensor_file import (
    MAX_HEADER_NBYTES,
    begins_tensor_file,
    read_metadata,
    read_tensor_file,
    write_tensor_file,
)

ARRAYS = {
    "b": np.arange(6, dtype="float32").reshape(2, 3),
    "a": np.arange(4, dtype="int64"),
    "none": np.zeros((0, 3), "float16"),
    "one": np.array(7, dtype="uint8"),
}


def whole(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


def read(data: bytes) -> dict[str, np.ndarray[Any, Any]]:
    file = read_tensor_file(memoryview(data))
    return {name: file.array(name) for name in file.entries}


def test_what_the_library_writes_is_read() -> None:
    data = save(ARRAYS, metadata={"a": "b"})
    found = read(data)
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name], array)
    assert read_metadata(data) == {"a": "b"}
    assert begins_tensor_file(data[:64])


def test_what_we_write_the_library_reads() -> None:
    names = {"float32": "F32", "int64": "I64", "float16": "F16", "uint8": "U8"}
    tensors = {name: (names[array.dtype.name], array) for name, array in ARRAYS.items()}
    data = b"".join(write_tensor_file(tensors, {"k": "ü"}))
    found = dict(safetensors.deserialize(data))
    assert {name: bytes(each["data"]) for name, each in found.items()} == {
        name: array.tobytes() for name, array in ARRAYS.items()
    }
    assert read_metadata(data) == {"k": "ü"}
    assert int.from_bytes(data[:8], "little") % 8 == 0


GOOD = b"\0" * 8

WRONG: dict[str, tuple[bytes, type[StateError], str]] = {
    "empty": (b"", Corrupt, "has 0"),
    "a prefix cut short": (b"\x08\0\0", Corrupt, "has 3"),
    "a header cut short": (whole({"a": entry()}, GOOD)[:20], Corrupt, "12 are there"),
    "a header too long for memory": (b"\xff" * 8 + b"{}", Corrupt, "are there"),
    "no JSON": (whole(b"{'a'}"), Corrupt, "not JSON"),
    "not UTF-8": (whole(b'{"\xff":1}'), Corrupt, "not JSON"),
    "a list": (whole([]), Corrupt, "not a JSON object"),
    "a space before": (whole(b" {}"), Corrupt, "not a JSON object"),
    "deep": (whole(b'{"a":' + b"[" * 50_000), Corrupt, "not JSON"),
    "a name twice": (whole(b'{"a":1,"a":2}'), Corrupt, "twice"),
    "a fraction": (whole(b'{"a":1.5}'), Corrupt, "1.5 for a number"),
    "no number": (whole(b'{"a":NaN}'), Corrupt, "NaN for a number"),
    "a number without end": (whole(b'{"a":' + b"9" * 5000 + b"}"), Corrupt, "no file could have"),
    "metadata that are no object": (whole({"__metadata__": []}), Corrupt, "not an object"),
    "metadata that are no text": (whole({"__metadata__": {"a": 1}}), Corrupt, "is not text"),
    "a tensor that is none": (whole({"a": 1}), Corrupt, "not said by"),
    "more than is known": (whole({"a": entry(more=1)}, GOOD), Corrupt, "not said by"),
    "no dtype": (whole({"a": entry(dtype=1)}, GOOD), Corrupt, "has no dtype"),
    "a dtype of no table": (whole({"a": entry(dtype="F4")}, GOOD), UnknownFeature, "'F4'"),
    "a shape that is none": (whole({"a": entry() | {"shape": 2}}, GOOD), Corrupt, "no list of"),
    "a truth for a size": (whole({"a": entry(shape=[True, 2])}, GOOD), Corrupt, "no tensor has"),
    "a size below 0": (whole({"a": entry(shape=[-2])}, GOOD), Corrupt, "no tensor has"),
    "sizes that overflow": (whole({"a": entry(shape=[2**40] * 8)}, GOOD), Corrupt, "and its shape"),
    "too many axes": (whole({"a": entry(shape=[1] * 9)}, GOOD), Corrupt, "no list of 8"),
    "one offset": (whole({"a": entry(offsets=[0])}, GOOD), Corrupt, "no place"),
    "offsets the wrong way": (whole({"a": entry(offsets=[8, 0])}, GOOD), Corrupt, "no place"),
    "bytes that are not the shape's": (whole({"a": entry(shape=[3])}, GOOD), Corrupt, "its shape 12"),
    "a gap": (whole({"a": entry(offsets=[4, 12])}, GOOD + b"\0" * 4), Corrupt, "begins at 4 and not at 0"),
    "an overlap": (whole({"a": entry(), "b": entry(offsets=[4, 12])}, GOOD * 2), Corrupt, "begins at 4"),
    "bytes behind": (whole({"a": entry()}, GOOD + b"\0"), Corrupt, "the file has 9 bytes"),
    "bytes missing": (whole({"a": entry()}, GOOD[1:]), Corrupt, "the file has 7 bytes"),
    "a long header": (whole(b"{" + b" " * MAX_HEADER_NBYTES + b"}"), LimitExceeded, "more than the"),
    "a header of many values": (whole(b'{"a":[' + b"[]," * 65_536 + b"]}"), LimitExceeded, "values allowed"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_is_wrong_in_one_thing_is_refused(name: str) -> None:
    data, error, says = WRONG[name]
    with pytest.raises(error, match=says):
        read(data)


@pytest.mark.parametrize("name", WRONG)
def test_no_header_costs_more_than_a_few_megabytes(name: str) -> None:
    data, error, _ = WRONG[name]
    tracemalloc.start()
    try:
        with pytest.raises(error):
            read(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(data) + 2**21


def test_no_metadata_may_be_said_as_nothing() -> None:
    """mlx does."""
    data = whole({"__metadata__": None, "a": entry()}, GOOD)
    assert read_metadata(data) == {}
    safetensors.deserialize(data)


def test_what_the_library_refuses_is_refused() -> None:
    """Headers with a byte or a word changed: never more is believed than the library believes."""
    good = save(ARRAYS, metadata={"a": "b"})
    length = int.from_bytes(good[:8], "little")
    draw = random.Random(1)
    changes: tuple[Callable[[bytearray, int], None], ...] = (
        lambda data, at: data.__setitem__(at, draw.randrange(256)),
        lambda data, at: data.__setitem__(at, data[at] ^ 1 << draw.randrange(8)),
        lambda data, at: data.__setitem__(at, draw.choice(b'0123456789[]{},:" ')),
        lambda data, at: data.__delitem__(at),
        lambda data, at: data.insert(at, draw.choice(b'0123456789[]{},:" ')),
    )
    refused = 0
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(draw.choice((1, 1, 2))):
            draw.choice(changes)(data, draw.randrange(8 + length))
        try:
            theirs = safetensors.deserialize(bytes(data))
        except (safetensors.SafetensorError, OverflowError):
            refused += 1
            with pytest.raises(StateError):
                read(bytes(data))
            continue
        try:
            found = read(bytes(data))
        except StateError:
            continue  # we may be stricter
        assert {name: array.tobytes() for name, array in found.items()} == {
            name: bytes(each["data"]) for name, each in theirs
        }
    assert 500 < refused < 3000
