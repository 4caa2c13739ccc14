"""Laws of canonical msgpack: one spelling for each value, and lengths are believed as far as bytes go."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import Corrupt, LimitExceeded, StateError
from serialization.canonical import pack, unpack

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=40)
    | st.binary(max_size=300)
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=8), inner, max_size=20),
    max_leaves=30,
).filter(lambda value: depth(value) <= 8)


def depth(value: Any) -> int:
    if isinstance(value, list):
        return 1 + max(map(depth, value), default=0)
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    return 0


@given(values)
def test_a_value_comes_back_and_has_one_spelling(value: Any) -> None:
    data = pack(value)
    assert unpack(data, "test") == value
    assert pack(unpack(data, "test")) == data
    assert msgpack.unpackb(data) == value  # any msgpack reader reads it


@given(st.binary(max_size=200))
def test_bytes_are_refused_or_are_the_one_spelling_of_their_value(data: bytes) -> None:
    try:
        value = unpack(data, "test")
    except StateError:
        return
    assert pack(value) == data


@pytest.mark.parametrize(
    "data",
    [
        b"\xcc\x05",  # 5 in two bytes
        b"\xd9\x01a",  # a short text with a long head
        b"\xca\x3f\x80\x00\x00",  # float32
        b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",  # not a number
        b"\x82\xa1b\x00\xa1a\x00",  # keys out of order
        b"\x82\xa1a\x00\xa1a\x01",  # a key twice
        b"\x81\x00\x00",  # a key that is no text
        b"\xd4\x00\x00",  # an extension
        b"\xc1",
        b"\xa1\xff",  # not UTF-8
        b"\x00\x00",  # something after the value
        b"",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
    ],
)
def test_other_spellings_are_refused(data: bytes) -> None:
    with pytest.raises(Corrupt):
        unpack(data, "test")


def test_deep_nesting_is_refused_before_it_is_built() -> None:
    with pytest.raises(LimitExceeded):
        unpack(b"\x91" * 100_000, "test")


def test_promised_lengths_allocate_nothing() -> None:
    data = (b"\xdd\x00\x0f\x00\x00" * 8) + bytes(2**20)
    tracemalloc.start()
    with pytest.raises(StateError):
        unpack(b"\xdd\xff\xff\xff\xff" + data, "test")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * 2**20
