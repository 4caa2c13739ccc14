"""Laws of what follows a manifest's prefix: it comes back, is believed no further than it is there, and is
not the larger for being packed."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import Corrupt, LimitExceeded, StateError
from serialization.bodies import pack_body, unpack_body
from serialization.canonical import pack
from serialization.limits import MAX_MANIFEST_NBYTES, MAX_PACKED, MIN_PACKED_NBYTES
from tests.serialization.manifests import TEXTS

TEXT = {"said": "To be, or not to be, that is the question. " * 9}
PLAIN = pack(TEXT)


def size(nbytes: int) -> bytes:
    return nbytes.to_bytes(4, "little")


def one_block(data: bytes) -> bytes:
    """The last block of a frame, not compressed."""
    return (1 | len(data) << 3).to_bytes(3, "little") + data


def frame(data: bytes, **how: Any) -> bytes:
    return zstandard.ZstdCompressor(**how).compress(data)


@given(st.dictionaries(TEXTS, TEXTS | st.binary() | st.integers(0, 2**64 - 1)))
def test_a_map_comes_back_and_is_never_larger_by_more_than_its_size(values: dict[str, Any]) -> None:
    body = pack_body(values)
    assert unpack_body(body, "test") == values
    assert len(body) <= len(pack(values)) + 4


def test_text_and_token_ids_are_stored_smaller() -> None:
    noise = random.Random(2)
    words = ["".join(noise.choices("etaoinshr", k=noise.randrange(1, 9))) for _ in range(500)]
    said = noise.choices(words, k=5000)
    ids = b"".join(words.index(word).to_bytes(3, "little") for word in said)
    values = {"messages": " ".join(said), "tokens": ids}
    assert len(pack_body(values)) < 0.6 * len(pack(values))


def test_what_does_not_shrink_is_stored_as_it_is() -> None:
    values = {"x": random.Random(1).randbytes(99)}
    assert pack_body(values) == size(len(pack(values))) + pack(values)


def test_what_shrinks_beyond_belief_is_stored_as_it_is() -> None:
    below, above = {"x": "a" * (MIN_PACKED_NBYTES - 9)}, {"x": "a" * MIN_PACKED_NBYTES}
    assert len(pack_body(below)) < 100
    assert pack_body(above)[4:] == pack(above)
    for values in (below, above):
        assert unpack_body(pack_body(values), "test") == values


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\0\0\0",
        size(0),
        size(len(PLAIN)),
        size(len(PLAIN)) + PLAIN[:-1],
        size(len(PLAIN)) + PLAIN + b"\0",
        size(len(PLAIN) - 1) + PLAIN,
        size(len(PLAIN)) + frame(PLAIN)[:-1],
        size(len(PLAIN)) + frame(PLAIN) + b"\0",
        size(len(PLAIN)) + frame(PLAIN) + frame(b""),
        size(len(PLAIN) - 1) + frame(PLAIN),
        size(len(PLAIN) + 1) + frame(PLAIN),
        size(len(PLAIN)) + frame(PLAIN, write_content_size=False),
        size(len(PLAIN)) + b"\x28\xb5\x2f\xfd\xa1\x07" + size(len(PLAIN)) + one_block(PLAIN[:9]),
        size(len(PLAIN)) + b"\x50\x2a\x4d\x18\x04\0\0\0skip" + frame(PLAIN),
        size(len(pack({}))) + frame(pack({})),
        size(6) + frame(pack("text!")),
        size(len(PLAIN) + 1) + frame(PLAIN + b"\0"),
        size(5) + frame(b"\x81\xa1x\xcc\x01"),
    ],
)
def test_each_wrong_body_is_refused(body: bytes) -> None:
    with pytest.raises(Corrupt):
        unpack_body(body, "test")


def test_a_map_is_never_larger_than_a_manifest_may_be() -> None:
    stored = bytes(MAX_MANIFEST_NBYTES // MAX_PACKED + 1)
    with pytest.raises(LimitExceeded) as caught:
        unpack_body(size(MAX_MANIFEST_NBYTES + 1) + stored, "test")
    assert caught.value.details["limit"] == MAX_MANIFEST_NBYTES
    with pytest.raises(Corrupt):
        unpack_body(size(MAX_MANIFEST_NBYTES) + stored, "test")


def test_promised_sizes_allocate_nothing() -> None:
    tracemalloc.start()
    small = frame(bytes(2**27))  # some 12 KiB that would become 128 MiB
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    for nbytes, stored in (
        (MAX_MANIFEST_NBYTES + 1, PLAIN),
        (MAX_MANIFEST_NBYTES, PLAIN),
        (MAX_MANIFEST_NBYTES, small),
        (MAX_PACKED * len(small) + 1, small),
    ):
        with pytest.raises(LimitExceeded):
            unpack_body(size(nbytes) + stored, "test")
    with pytest.raises(Corrupt):  # the frame has more than the size tells
        unpack_body(size(MAX_PACKED * len(small)) + small, "test")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak - before < 2**20


def test_a_frame_that_holds_more_than_it_declares_fills_no_memory() -> None:
    """Blocks of one byte that is repeated: four bytes are 64 KiB."""
    block = (1 << 1 | 2**16 << 3).to_bytes(3, "little") + b"\xc0"
    lying = b"\x28\xb5\x2f\xfd\xa0" + size(2**16) + block * 1000 + one_block(b"")
    assert zstandard.get_frame_parameters(lying).content_size == 2**16
    tracemalloc.start()
    with pytest.raises(Corrupt):
        unpack_body(size(2**16) + lying, "test")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**18


def test_nothing_but_state_errors_comes_out_of_noise() -> None:
    noise, good = random.Random(5), pack_body(TEXT)
    for _ in range(500):
        damaged = bytearray(good)
        for _ in range(noise.randrange(1, 4)):
            damaged[noise.randrange(len(damaged))] = noise.randrange(256)
        try:
            found = unpack_body(bytes(damaged), "test")
        except StateError:
            continue
        assert isinstance(found, dict)
