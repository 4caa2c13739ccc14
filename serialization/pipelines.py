"""Pipelines of codecs: the named sets that writers offer, and how one is run over a section."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from engine.errors import ConfigError, Corrupt
from serialization.buffers import NEW, Buffers, Stream
from serialization.codecs import Entropy, Fields, zstd_mode
from serialization.floats import ChannelOffset, FloatSplit
from serialization.streams import Codec, Grid, Streams

Pipeline = tuple[Codec, ...]


@dataclass(frozen=True, slots=True)
class CodecSet:
    """A pipeline for every row dtype; a dtype that is not named is stored as it is."""

    name: str
    pipelines: Mapping[str, Pipeline]

    def pipeline(self, dtype: str) -> Pipeline:
        return self.pipelines.get(dtype, ())

    def at_level(self, level: int) -> CodecSet:
        """The same, but streams that are searched for repetitions are so at another `level`. Raises
        ConfigError for one that there is not, or where nothing is searched."""
        if not self.pipelines:
            raise ConfigError(f"codec {self.name!r} packs nothing, so that it has no level")
        mode = zstd_mode(level)
        levelled = {
            dtype: tuple(codec.searching(mode) if isinstance(codec, Entropy) else codec for codec in pipeline)
            for dtype, pipeline in self.pipelines.items()
        }
        return CodecSet(self.name, levelled)


_QUANTIZED: Mapping[str, Pipeline] = {
    "q8_0": (Fields((1, 1, 32)), Entropy(("stored", "huffman", "huffman"))),
    "q5_0": (Fields((1, 1, 4, 16)), Entropy(("stored", "huffman", "stored", "huffman"))),
    "q4_0": (Fields((1, 1, 16)), Entropy(("stored", "huffman", "huffman"))),
    "i64": (Entropy(("zstd-1",)),),
}


def _fast(word: int) -> Pipeline:
    return FloatSplit(word), ChannelOffset(), Entropy(("huffman", "stored", "zstd-1"))


def _default(word: int) -> Pipeline:
    return FloatSplit(word), ChannelOffset(), Entropy(("huffman", "zstd-1", "zstd-1"))


RAW = CodecSet("raw", {})
FAST = CodecSet("fast", {"bf16": _fast(2), "f16": _fast(2), "f32": _fast(4), **_QUANTIZED})
DEFAULT = CodecSet("default", {"bf16": _default(2), "f16": _default(2), "f32": _default(4), **_QUANTIZED})
CODEC_SETS: Mapping[str, CodecSet] = {codecs.name: codecs for codecs in (RAW, FAST, DEFAULT)}


def codec_set(name: str) -> CodecSet:
    """The set called `name`. Raises ConfigError, with the names there are."""
    if name not in CODEC_SETS:
        raise ConfigError(f"codec {name!r} is not one of {', '.join(CODEC_SETS)}")
    return CODEC_SETS[name]


def encode(section: Stream, pipeline: Pipeline, grid: Grid) -> tuple[Pipeline, Streams]:
    """The pipeline that was used and its streams: `()` and the section itself where it does not shrink."""
    streams = [section]
    for codec in pipeline:
        streams = codec.encode(streams, grid)
    if sum(len(stream) for stream in streams) < len(section):
        return pipeline, streams
    return (), [section]


def unpack(
    streams: Streams, pipeline: Pipeline, grid: Grid, buffers: Buffers = NEW
) -> tuple[Pipeline, Streams]:
    """The first half of `decode`: what is left to do, and the streams with the last step undone where that
    packs. That is all of the work that the library does, a call for each stream. Raises as `decode`."""
    if not pipeline or not isinstance(pipeline[-1], Entropy):
        return pipeline, streams
    before = _sizes(pipeline, grid)
    return pipeline[:-1], _undone(pipeline[-1], _counted(streams, before[-1]), before[-2], grid, buffers)


def decode(streams: Streams, pipeline: Pipeline, grid: Grid, buffers: Buffers = NEW) -> Stream:
    """The section, `grid.nbytes` long, in `buffers`; a view of `streams` where nothing was encoded.

    Raises Corrupt if the streams do not make a section of just that size.
    """
    before = _sizes(pipeline, grid)
    streams = _counted(streams, before[-1])
    for codec, sizes in zip(reversed(pipeline), reversed(before[:-1]), strict=True):
        streams = _undone(codec, streams, sizes, grid, buffers)
    if len(streams[0]) != grid.nbytes:
        raise Corrupt("a section of the wrong size")
    return streams[0] if streams[0].dtype == np.uint8 else streams[0].view(np.uint8)


def _sizes(pipeline: Pipeline, grid: Grid) -> list[list[int]]:
    """Of the streams before the first step, and after each."""

    def after(sizes: list[int], codec: Codec) -> list[int]:
        return codec.sizes(sizes, grid)

    return list(accumulate(pipeline, after, initial=[grid.nbytes]))


def _counted(streams: Streams, sizes: list[int]) -> Streams:
    if len(streams) != len(sizes):
        raise Corrupt("a section with another number of streams than its codecs make")
    return streams


def _undone(codec: Codec, streams: Streams, sizes: list[int], grid: Grid, buffers: Buffers) -> Streams:
    streams = codec.decode(streams, sizes, grid, buffers)
    if [len(stream) for stream in streams] != sizes:
        raise Corrupt(f"codec {codec.name}: streams of the wrong size")
    return streams
