"""Laws of the frame: a blob says what it holds, and holds nothing else."""

from __future__ import annotations

import random
import tracemalloc
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import Corrupt, LimitExceeded, StateError, UnknownFeature, UnknownVersion
from engine.state import Layout, PartKind, PartSpec, Point, Rows, parts_of
from serialization.blobs import BlobClass, blob_id, verify_blob
from serialization.canonical import pack, unpack
from serialization.chunks import decode_rows, encode_rows, read_header
from serialization.pipelines import CODEC_SETS, DEFAULT, RAW, CodecSet
from serialization.points import decode_logits, decode_point, encode_logits, encode_point
from tests.serialization.states import FOUR_KINDS, row_bytes, rows_for

TOKEN = parts_of(FOUR_KINDS, PartKind.TOKEN)
SMALL: Layout = (PartSpec("k", PartKind.TOKEN, 0, "bf16", (4,)),)


def small_blob() -> bytes:
    return encode_rows(PartKind.TOKEN, SMALL, 0, 3, [rows_for(SMALL, PartKind.TOKEN, 0, 3)], RAW)


def reframed(data: bytes, **changes: object) -> bytes:
    """`data` with other values in its header."""
    size = int.from_bytes(data[8:12], "little")
    header: dict[str, Any] = unpack(data[12 : 12 + size], "test")
    packed = pack({**header, **changes})
    return data[:8] + len(packed).to_bytes(4, "little") + packed + data[12 + size :]


def decode_small(data: bytes) -> Rows:
    return decode_rows(data, PartKind.TOKEN, SMALL, 0, 3)


@pytest.mark.parametrize("codecs", CODEC_SETS.values(), ids=lambda codecs: codecs.name)
@pytest.mark.parametrize("kind", [PartKind.TOKEN, PartKind.BLOCK, PartKind.WINDOW])
@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 256), (256, 300), (512, 768), (520, 768)])
def test_rows_of_every_kind_and_dtype_come_back(
    kind: PartKind, start: int, stop: int, codecs: CodecSet
) -> None:
    specs = parts_of(FOUR_KINDS, kind)
    rows = rows_for(FOUR_KINDS, kind, start, stop)
    found = decode_rows(encode_rows(kind, specs, start, stop, [rows], codecs), kind, specs, start, stop)
    for mine, theirs in zip(found.parts, rows.parts, strict=True):
        assert mine.shape == theirs.shape
        assert torch.equal(mine, theirs)


@given(cuts=st.lists(st.integers(256, 500), max_size=4).map(sorted))
def test_a_chunk_is_the_same_from_however_many_runs(cuts: list[int]) -> None:
    for kind in (PartKind.TOKEN, PartKind.BLOCK):
        specs = parts_of(FOUR_KINDS, kind)
        edges = [200, *cuts, 700]
        runs = [rows_for(FOUR_KINDS, kind, start, stop) for start, stop in pairwise(edges) if start < stop]
        whole = [rows_for(FOUR_KINDS, kind, 256, 512)]
        assert encode_rows(kind, specs, 256, 512, runs, RAW) == encode_rows(kind, specs, 256, 512, whole, RAW)


def test_decoded_parts_are_views_of_one_buffer_for_each_dtype() -> None:
    rows = rows_for(FOUR_KINDS, PartKind.TOKEN, 0, 256)
    found = decode_rows(
        encode_rows(PartKind.TOKEN, TOKEN, 0, 256, [rows], DEFAULT), PartKind.TOKEN, TOKEN, 0, 256
    )
    first, _, third = found.parts
    assert first.untyped_storage().data_ptr() == third.untyped_storage().data_ptr()
    assert third.data_ptr() == first.data_ptr() + first.numel()


def test_rows_that_do_not_cover_the_chunk_are_not_stored() -> None:
    for run in ((0, 200), (10, 256)):
        rows = rows_for(FOUR_KINDS, PartKind.TOKEN, *run)
        with pytest.raises(Corrupt):
            encode_rows(PartKind.TOKEN, TOKEN, 0, 256, [rows], RAW)


def test_point_state_and_logits_come_back() -> None:
    specs = parts_of(FOUR_KINDS, PartKind.POINT)
    point = Point(77, tuple(row_bytes(spec, 77, 78)[0] for spec in specs))
    found = decode_point(encode_point(specs, point, DEFAULT), specs, 77)
    assert all(torch.equal(*pair) for pair in zip(found.parts, point.parts, strict=True))
    logits = torch.tensor([0.0, -0.0, float("nan"), float("-inf"), 1e-42])
    back = decode_logits(encode_logits(logits, 5, DEFAULT), 5, 5)
    assert torch.equal(back.view(torch.int32), logits.view(torch.int32))
    with pytest.raises(Corrupt):
        decode_logits(encode_logits(logits, 5, DEFAULT), 6, 5)
    with pytest.raises(Corrupt):
        encode_logits(logits.double(), 5, DEFAULT)


def test_any_changed_bit_is_refused() -> None:
    data = small_blob()
    name = blob_id(BlobClass.ROWS, data)
    for at in range(len(data)):
        for bit in range(8):
            changed = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
            with pytest.raises(Corrupt):
                verify_blob(name, changed)
            if at < len(data) - 24:  # the frame alone notices all but a change in raw rows
                with pytest.raises(StateError):
                    decode_small(changed)


def test_a_blob_that_is_cut_or_goes_on_is_refused() -> None:
    data = small_blob()
    for end in range(len(data)):
        with pytest.raises(Corrupt):
            decode_small(data[:end])
    with pytest.raises(Corrupt):
        decode_small(data + b"\0")


def test_an_encoded_blob_that_is_damaged_never_raises_but_state_errors() -> None:
    noise = random.Random(2)
    rows = rows_for(FOUR_KINDS, PartKind.TOKEN, 0, 64)
    data = encode_rows(PartKind.TOKEN, TOKEN, 0, 64, [rows], DEFAULT)
    for _ in range(1500):
        changed = bytearray(data)
        for _ in range(noise.randrange(1, 4)):
            changed[noise.randrange(len(data))] = noise.randrange(256)
        with suppress(StateError):
            decode_rows(bytes(changed), PartKind.TOKEN, TOKEN, 0, 64)


@given(st.binary(max_size=300))
def test_noise_is_refused(data: bytes) -> None:
    for start in (b"", small_blob()[:8], small_blob()[:12]):
        with pytest.raises(StateError):
            decode_small(start + data)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"kind": "window"}, Corrupt),
        ({"kind": "rows"}, UnknownFeature),
        ({"kind": 3}, Corrupt),
        ({"start": 1}, Corrupt),
        ({"start": 5}, Corrupt),
        ({"start": -1}, Corrupt),
        ({"stop": 2**40}, LimitExceeded),
        ({"raw_nbytes": 25}, Corrupt),
        ({"raw_nbytes": 2**40}, LimitExceeded),
        ({"parts": [[1, "bf16", [5], 1]]}, Corrupt),
        ({"parts": [[1, "f16", [4], 1]]}, Corrupt),
        ({"parts": [[1, "f64", [4], 1]]}, UnknownFeature),
        ({"parts": [[2**20, "bf16", [4], 1]]}, LimitExceeded),
        ({"parts": [[1, "bf16", [2**30, 2**30, 2**30], 1]]}, LimitExceeded),
        ({"parts": [[0, "bf16", [4], 1]]}, Corrupt),
        ({"parts": [[1, "bf16", [], 1]]}, Corrupt),
        ({"parts": [[1, "bf16", [0], 1]]}, Corrupt),
        ({"parts": [[1, "bf16", [4], 0]]}, Corrupt),
        ({"parts": [[1, "q8_0", [4], 1]]}, Corrupt),
        ({"parts": [[1, "bf16", [2], 1], [1, "bf16", [2], 1]]}, Corrupt),
        ({"parts": []}, Corrupt),
        ({"sections": []}, Corrupt),
        ({"sections": [["bf16", [], [23]]]}, Corrupt),
        ({"sections": [["bf16", [], [12, 12]]]}, Corrupt),
        ({"sections": [["bf16", [["lzma", {}]], [24]]]}, UnknownFeature),
        ({"sections": [["bf16", [["entropy", {"modes": ["brotli"]}]], [24]]]}, UnknownFeature),
        ({"sections": [["bf16", [["float-split", {"word": 2}]], [24]]]}, Corrupt),
        ({"sections": [["bf16", [["float-split", 2]], [24]]]}, Corrupt),
        ({"sections": [["bf16", [["channel-offset", {}]] * 9, [24]]]}, LimitExceeded),
        ({"sections": [["f16", [], [24]]]}, Corrupt),
        ({"sections": [["bf16", [], [2**40]]]}, LimitExceeded),
        ({"more": 1}, Corrupt),
    ],
)
def test_each_wrong_header_is_refused_by_its_own_error(
    changes: dict[str, object], error: type[StateError]
) -> None:
    with pytest.raises(error) as caught:
        decode_small(reframed(small_blob(), **changes))
    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("parts", "dtype"),
    [
        ([[1, "f16", [4], 1]], "f16"),
        ([[1, "bf16", [2, 2], 1]], "bf16"),
        ([[2, "bf16", [2], 1]], "bf16"),
        ([[1, "bf16", [12], 3]], "bf16"),
    ],
)
def test_other_parts_of_the_same_size_are_refused(parts: list[object], dtype: str) -> None:
    data = reframed(small_blob(), parts=parts, sections=[[dtype, [], [24]]])
    assert read_header(data).raw_nbytes == 24
    with pytest.raises(Corrupt, match="layout"):
        decode_small(data)


def test_runs_of_parts_have_one_spelling() -> None:
    specs = SMALL + SMALL
    rows = rows_for(specs, PartKind.TOKEN, 0, 3)
    data = encode_rows(PartKind.TOKEN, specs, 0, 3, [rows], RAW)
    with pytest.raises(Corrupt, match="two runs"):
        read_header(reframed(data, parts=[[1, "bf16", [4], 1]] * 2))


def test_another_version_magic_or_letter_is_refused() -> None:
    data = small_blob()
    with pytest.raises(UnknownVersion, match="version 9"):
        decode_small(data[:7] + b"\x09" + data[8:])
    for changed in (b"T" + data[1:], data[:6] + b"M" + data[7:]):
        with pytest.raises(Corrupt):
            decode_small(changed)


def test_a_huge_declared_header_or_row_allocates_nothing() -> None:
    data = small_blob()
    huge = [[1, "bf16", [2**27], 1]]
    tracemalloc.start()
    with pytest.raises(LimitExceeded):
        decode_small(data[:8] + b"\xff\xff\xff\xff" + data[12:])
    with pytest.raises(Corrupt):  # consistent with itself, but not with the layout
        decode_small(reframed(data, parts=huge, raw_nbytes=3 * 2**28))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


def test_a_header_tells_what_a_blob_holds_without_decoding_it() -> None:
    header = read_header(small_blob())
    assert (header.kind, header.start, header.stop, header.raw_nbytes) == ("token", 0, 3, 24)
    assert header.sections[0].pipeline == ()


def test_a_blob_that_would_be_too_large_is_not_written() -> None:
    spec = PartSpec("k", PartKind.TOKEN, 0, "bf16", (2**22,))
    row = torch.zeros(1, 1, dtype=torch.uint8).expand(256, spec.row_nbytes)
    with pytest.raises(LimitExceeded):
        encode_rows(PartKind.TOKEN, (spec,), 0, 256, [Rows(PartKind.TOKEN, 0, 256, (row,))], RAW)
