"""Laws of the `.tenuto` file: it carries a session whole, and is believed whole or not at all."""

from __future__ import annotations

import io
import random
import tracemalloc
from dataclasses import replace
from functools import cache

import pytest
from blake3 import blake3

from engine.errors import BlobMissing, Corrupt, LimitExceeded, StateError, UnknownVersion
from serialization.archive import archive_nbytes, check_archive, read_archive, write_archive
from serialization.manifest import Manifest
from serialization.snapshot import read_state, write_state
from tests.serialization.states import (
    ATTENTION,
    EMPTY,
    FOUR_KINDS,
    CountingStore,
    expect_rows,
    logits_edge,
    manifest_of,
    state_of,
)


class Pipe:
    """A stream that cannot seek, and hands out a few bytes at a time."""

    def __init__(self, data: bytes, most: int) -> None:
        self._inner = io.BytesIO(data)
        self._most = most

    def read(self, nbytes: int, /) -> bytes:
        assert nbytes <= 2**20, "a source may make room for all that is asked"
        return self._inner.read(min(nbytes, self._most))


@cache
def archived(length: int = 600) -> tuple[Manifest, bytes]:
    store, state = CountingStore(), state_of(length, FOUR_KINDS, edge=logits_edge())
    manifest = manifest_of(state, write_state(store, state, None, 0))
    out = io.BytesIO()
    assert write_archive(out, manifest, store) == len(out.getvalue()) == archive_nbytes(manifest)
    return manifest, out.getvalue()


@cache
def small() -> bytes:
    store, state = CountingStore(), state_of(2, ATTENTION)
    out = io.BytesIO()
    write_archive(out, manifest_of(state, write_state(store, state, None, 0)), store)
    return out.getvalue()


@pytest.mark.parametrize("most", [1, 7, 2**20])
def test_a_session_comes_out_of_its_archive_in_another_store(most: int) -> None:
    manifest, data = archived()
    store = CountingStore()
    assert read_archive(Pipe(data, most), store) == manifest
    assert store.blobs() == {ref.blob for ref in manifest.blobs()}
    expect_rows(read_state(store, manifest), manifest.length)


def test_a_session_without_tokens_has_an_archive() -> None:
    out = io.BytesIO()
    write_archive(out, EMPTY, CountingStore())
    assert check_archive(io.BytesIO(out.getvalue())) == EMPTY


def test_equal_sessions_have_equal_archives() -> None:
    manifest, data = archived()
    store = CountingStore()
    read_archive(io.BytesIO(data), store)
    out = io.BytesIO()
    write_archive(out, manifest, store)
    assert out.getvalue() == data


def test_an_archive_that_is_cut_anywhere_is_refused() -> None:
    data = small()
    for end in range(len(data)):
        with pytest.raises(StateError):
            check_archive(io.BytesIO(data[:end]))


def test_an_archive_with_any_byte_changed_is_refused() -> None:
    data = small()
    for at in range(len(data)):
        for bit in range(8):
            with pytest.raises(StateError):
                check_archive(io.BytesIO(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]))


def test_bytes_after_the_end_are_refused() -> None:
    with pytest.raises(Corrupt, match="after the end"):
        check_archive(io.BytesIO(small() + b"\0"))


def test_another_version_is_refused_by_its_number() -> None:
    data = small()
    with pytest.raises(UnknownVersion, match="version 2"):
        check_archive(io.BytesIO(data[:7] + b"\x02" + data[8:]))


def records(data: bytes) -> list[bytes]:
    """The records between prefix and end."""
    at, found = 8, []
    while data[at : at + 1] != b"E":
        end = at + 41 + int.from_bytes(data[at + 1 : at + 9], "little")
        found.append(data[at:end])
        at = end
    return found


def sealed(data: bytes) -> bytes:
    return data + blake3(data).digest()


def test_records_that_are_missing_doubled_or_out_of_order_are_refused() -> None:
    _, data = archived()
    all_of = records(data)
    assert sealed(data[:8] + b"".join(all_of) + b"E") == data
    orders = [
        all_of[:-1],
        [*all_of, all_of[-1]],
        all_of[1:],
        [all_of[0], *reversed(all_of[1:])],
        [all_of[0], all_of[1], all_of[1], *all_of[2:]],
        [],
    ]
    for order in orders:
        with pytest.raises(Corrupt):
            check_archive(io.BytesIO(sealed(data[:8] + b"".join(order) + b"E")))


def test_a_manifest_that_is_not_what_its_record_says_is_refused() -> None:
    data = small()
    body = data[:-32]
    with pytest.raises(Corrupt):
        check_archive(io.BytesIO(sealed(body[:20] + bytes([body[20] ^ 1]) + body[21:])))


def test_a_huge_declared_length_allocates_nothing() -> None:
    head = small()[:8]
    tracemalloc.start()
    with pytest.raises(LimitExceeded):
        check_archive(io.BytesIO(head + b"M" + (2**63).to_bytes(8, "little") + bytes(32)))
    with pytest.raises(Corrupt):
        check_archive(Pipe(head + b"M" + (2**27).to_bytes(8, "little") + bytes(32), 2**20))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * 2**20


def test_nothing_but_state_errors_comes_out_of_noise() -> None:
    noise = random.Random(1)
    for _ in range(300):
        data = bytearray(small())
        for _ in range(noise.randrange(1, 6)):
            data[noise.randrange(len(data))] = noise.randrange(256)
        if bytes(data) != small():
            with pytest.raises(StateError):
                check_archive(io.BytesIO(bytes(data)))
        with pytest.raises(StateError):
            check_archive(io.BytesIO(small()[:8] + noise.randbytes(noise.randrange(400))))


def test_a_manifest_whose_blobs_are_gone_has_no_archive() -> None:
    manifest, _ = archived()
    with pytest.raises(BlobMissing):
        write_archive(io.BytesIO(), manifest, CountingStore())


def test_a_blob_of_another_size_than_the_manifest_says_is_not_archived() -> None:
    store, state = CountingStore(), state_of(2, ATTENTION)
    manifest = manifest_of(state, write_state(store, state, None, 0))
    (chunk,) = manifest.chunks
    (blob,) = chunk.blobs
    wrong = replace(blob, ref=replace(blob.ref, nbytes=blob.ref.nbytes + 1))
    with pytest.raises(Corrupt):
        write_archive(io.BytesIO(), replace(manifest, chunks=(replace(chunk, blobs=(wrong,)),)), store)
