"""Laws of the codecs: exact for every bit pattern, and nothing that a stream promises is believed."""

from __future__ import annotations

import tracemalloc
from collections.abc import Mapping

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ConfigError, Corrupt, StateError, UnknownFeature
from engine.state import DTYPES
from serialization import pipelines
from serialization.buffers import Stream
from serialization.codecs import Entropy, Fields, codec_named
from serialization.floats import ChannelOffset, FloatSplit
from serialization.pipelines import CODEC_SETS, DEFAULT, FAST, codec_set
from serialization.streams import Codec, Grid

SETS = [FAST, DEFAULT]


def random_bits(nbytes: int, seed: int, spread: int) -> Stream:
    """Bytes from the whole range (spread 255) down to all alike (0)."""
    return np.random.default_rng(seed).integers(0, spread + 1, nbytes, np.uint8)


def round_trip(section: Stream, codecs: pipelines.CodecSet, grid: Grid) -> Stream:
    pipeline, streams = pipelines.encode(section, codecs.pipeline(grid.dtype), grid)
    assert sum(map(len, streams)) <= len(section)
    copies = [np.frombuffer(stream.tobytes(), np.uint8) for stream in streams]  # read-only, as from a blob
    return pipelines.decode(copies, pipeline, grid)


runs = st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from([0, 1, 2, 17, 256]), st.sampled_from([32, 64])),
    min_size=1,
    max_size=3,
)


@given(
    dtype=st.sampled_from(sorted(DTYPES)),
    runs=runs,
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([0, 1, 15, 255]),
    codecs=st.sampled_from(SETS),
)
def test_every_bit_pattern_of_every_dtype_comes_back(
    dtype: str, runs: list[tuple[int, int, int]], seed: int, spread: int, codecs: pipelines.CodecSet
) -> None:
    grid = Grid(dtype, tuple(runs))
    section = random_bits(grid.nbytes, seed, spread)
    assert np.array_equal(round_trip(section.copy(), codecs, grid), section)


@given(
    words=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40),
    codecs=st.sampled_from(SETS),
    dtype=st.sampled_from(["bf16", "f16", "f32"]),
)
def test_floats_that_shrink_come_back_nan_payloads_and_all(
    words: list[int], codecs: pipelines.CodecSet, dtype: str
) -> None:
    """A few odd values (any bits at all) among many equal ones, so that a pipeline is really used."""
    width = DTYPES[dtype][0]
    section = np.full(4096, 0x3F80_0001, "<u4")
    section[: len(words)] = words
    raw = section.view(np.uint8)
    grid = Grid(dtype, ((1, 4096 * 4 // width // 64, 64),))
    pipeline, _ = pipelines.encode(raw, codecs.pipeline(dtype), grid)
    assert pipeline
    assert np.array_equal(round_trip(raw.copy(), codecs, grid), raw)


def test_all_65536_half_floats_come_back() -> None:
    raw = np.tile(np.arange(65536, dtype="<u2"), 4).view(np.uint8)
    grid = Grid("bf16", ((4, 64, 1024),))
    pipeline = DEFAULT.pipeline("bf16")
    streams = [raw.copy()]
    for codec in pipeline:
        streams = codec.encode(streams, grid)
    assert np.array_equal(pipelines.decode(streams, pipeline, grid), raw)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_the_split_is_the_one_that_the_format_describes(dtype: str) -> None:
    """The fast path against the words of docs/format.md, bit by bit."""
    width = DTYPES[dtype][0]
    raw = random_bits(512 * width, 3, 255)
    words = [int.from_bytes(raw[at : at + width], "little") for at in range(0, len(raw), width)]
    exponent, rest = FloatSplit(width).encode([raw], Grid(dtype, ((1, 8, 64),)))
    if width == 2:
        assert exponent.tolist() == [word >> 7 & 0xFF for word in words]
        assert rest.tolist() == [word >> 15 << 7 | word & 0x7F for word in words]
    else:
        assert exponent.tolist() == [word >> 23 & 0xFF for word in words]
        first = [word >> 31 << 7 | word >> 16 & 0x7F for word in words]
        second, third = [word >> 8 & 0xFF for word in words], [word & 0xFF for word in words]
        assert rest.tolist() == first + second + third


def test_offsets_are_the_mean_exponent_of_each_channel_of_each_part() -> None:
    grid = Grid("bf16", ((2, 3, 4), (1, 0, 4), (1, 2, 5), (1, 300, 4)))
    exponent = random_bits(grid.num_values, 1, 255)
    exponent[-1200:] = 255  # more than 16 bits hold
    found, offsets = ChannelOffset().encode([exponent.copy()], grid)
    assert len(offsets) == 2 * 4 + 5 + 4
    part = exponent[12:24].reshape(3, 4)
    assert offsets[4:8].tolist() == [(total + 1) // 3 for total in part.sum(axis=0).tolist()]
    assert found[12:24].reshape(3, 4).tolist() == (part - offsets[4:8]).tolist()
    assert offsets[-4:].tolist() == [255] * 4


def test_bf16_rows_of_normal_values_shrink_by_more_than_four_tenths() -> None:
    noise = np.random.default_rng(0)
    scale = np.exp(noise.standard_normal((4, 1, 64)))
    values = (noise.standard_normal((4, 256, 64)) * scale).astype(np.float32)
    raw = (values.view(np.uint32) >> 16).astype("<u2").reshape(-1).view(np.uint8)
    grid = Grid("bf16", ((4, 256, 64),))
    sizes = {
        codecs.name: sum(len(stream) for stream in pipelines.encode(raw, codecs.pipeline("bf16"), grid)[1])
        for codecs in CODEC_SETS.values()
    }
    assert sizes["raw"] == len(raw)
    assert sizes["default"] <= sizes["fast"] < len(raw) / 1.4


def test_a_section_that_does_not_shrink_is_stored_as_it_is() -> None:
    grid = Grid("bf16", ((1, 64, 64),))
    section = random_bits(grid.nbytes, 5, 255)
    pipeline, streams = pipelines.encode(section, DEFAULT.pipeline("bf16"), grid)
    assert pipeline == ()
    assert streams == [section]


@pytest.mark.parametrize(
    "codec",
    [
        FloatSplit(2),
        FloatSplit(4),
        ChannelOffset(),
        Fields((1, 1, 32)),
        Entropy(("stored", "huffman", "zstd-1")),
    ],
)
def test_a_codec_is_rebuilt_from_its_name_and_config(codec: Codec) -> None:
    assert codec_named(codec.name, codec.config) == codec


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("float-split", {}),
        ("float-split", {"word": 3}),
        ("float-split", {"word": True}),
        ("float-split", {"word": 2, "more": 1}),
        ("channel-offset", {"word": 2}),
        ("fields", {"sizes": []}),
        ("fields", {"sizes": [0]}),
        ("fields", {"sizes": [2**40]}),
        ("fields", {"sizes": [1] * 17}),
        ("fields", {"sizes": "11"}),
        ("entropy", {"modes": []}),
        ("entropy", {"modes": [["huffman"]]}),
        ("entropy", {"modes": None}),
    ],
)
def test_a_config_that_a_codec_does_not_take_is_refused(name: str, config: Mapping[str, object]) -> None:
    with pytest.raises(Corrupt):
        codec_named(name, config)


def test_unknown_codecs_and_modes_are_refused_by_name() -> None:
    with pytest.raises(UnknownFeature, match="lzma"):
        codec_named("lzma", {})
    with pytest.raises(UnknownFeature, match="brotli"):
        codec_named("entropy", {"modes": ["brotli"]})
    with pytest.raises(ConfigError, match="raw, fast, default"):
        codec_set("best")


def packed(data: bytes) -> Stream:
    return np.frombuffer(zstandard.ZstdCompressor().compress(data), np.uint8)


def test_a_frame_of_another_size_is_refused_before_it_is_unpacked() -> None:
    bomb = packed(bytes(2**28))
    tracemalloc.start()
    for nbytes in (2**20, 2**28 - 1, 2**28 + 1):
        with pytest.raises(Corrupt):
            Entropy(("zstd-1",)).decode([bomb], [nbytes], Grid("bf16", ()))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize(
    "stream",
    [
        packed(bytes(1000))[:-1],
        np.concatenate([packed(bytes(1000)), packed(b"")]),
        np.concatenate([packed(bytes(1000)), np.zeros(1, np.uint8)]),
        np.frombuffer(zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000)), np.uint8),
        np.frombuffer(b"\x50\x2a\x4d\x18\x08\x00\x00\x00" + bytes(8), np.uint8),  # a skippable frame
        np.zeros(5, np.uint8),
        np.zeros(0, np.uint8),
        np.zeros(1001, np.uint8),
    ],
)
def test_a_stream_that_is_not_just_the_frame_it_should_be_is_refused(stream: Stream) -> None:
    with pytest.raises(Corrupt):
        Entropy(("zstd-1",)).decode([stream], [1000], Grid("bf16", ()))


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("level", [1, 19])
def test_any_frame_of_the_right_size_is_read(level: int, checksum: bool) -> None:
    """Of several blocks: noise, what repeats one byte, and what shrinks."""
    noise = random_bits(200_000, 1, 255).tobytes()
    data = noise + bytes(300_000) + b"again and again " * 20_000
    made = zstandard.ZstdCompressor(level=level, write_checksum=checksum).compress(data)
    entropy = Entropy(("zstd-1",))
    (found,) = entropy.decode([np.frombuffer(made, np.uint8)], [len(data)], Grid("bf16", ()))
    assert found.tobytes() == data
    for wrong in (made[:-1], made + made, made[:150_000]):
        with pytest.raises(Corrupt):
            entropy.decode([np.frombuffer(wrong, np.uint8)], [len(data)], Grid("bf16", ()))


CODECS: list[Codec] = [
    FloatSplit(2),
    FloatSplit(4),
    ChannelOffset(),
    Fields((1, 1)),
    Entropy(("huffman",)),
    Entropy(("huffman", "stored")),
    Entropy(("huffman", "zstd-1", "zstd-1")),
]


@given(
    names=st.lists(
        st.sampled_from(CODECS),
        max_size=4,
    ),
    streams=st.lists(st.binary(max_size=80), max_size=4),
    dtype=st.sampled_from(["bf16", "f32", "q8_0"]),
)
def test_any_pipeline_over_any_streams_gives_the_right_size_or_is_refused(
    names: list[Codec], streams: list[bytes], dtype: str
) -> None:
    grid = Grid(dtype, ((1, 1, 32),))
    try:
        found = pipelines.decode([np.frombuffer(each, np.uint8) for each in streams], tuple(names), grid)
    except StateError:
        return
    assert len(found) == grid.nbytes
