"""Lossless codecs: frozen values that turn a list of byte streams into another, and back.

A pipeline is a tuple of them, recorded in the blob, so that any reader rebuilds it (docs/format.md,
section 4.2). A section of rows begins as one stream; every step works on the whole section at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard

from engine.errors import ConfigError, Corrupt, UnknownFeature
from serialization.buffers import NEW, Buffers, Stream
from serialization.floats import ChannelOffset, FloatSplit
from serialization.limits import MAX_FIELD_NBYTES, MAX_STREAMS
from serialization.streams import Codec, Grid, Streams, expected


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of quantized blocks apart; `field_nbytes` are their sizes, e.g. 1, 1, 32 for q8_0."""

    field_nbytes: tuple[int, ...]
    name = "fields"

    @property
    def config(self) -> Mapping[str, object]:
        return {"sizes": list(self.field_nbytes)}

    def sizes(self, sizes: list[int], grid: Grid) -> list[int]:
        block = sum(self.field_nbytes)
        if len(sizes) != 1 or sizes[0] % block:
            raise Corrupt("codec fields: not one stream of whole blocks")
        return [sizes[0] // block * nbytes for nbytes in self.field_nbytes]

    def encode(self, streams: Streams, grid: Grid) -> Streams:
        blocks = streams[0].reshape(-1, sum(self.field_nbytes))
        cuts = np.cumsum(self.field_nbytes)[:-1]
        return [np.ascontiguousarray(field).reshape(-1) for field in np.split(blocks, cuts, axis=1)]

    def decode(self, streams: Streams, sizes: list[int], grid: Grid, buffers: Buffers = NEW) -> Streams:
        streams = expected(streams, self.sizes(sizes, grid))
        out = buffers.take(sizes[0])
        blocks, at = out.reshape(-1, sum(self.field_nbytes)), 0
        for stream, nbytes in zip(streams, self.field_nbytes, strict=True):
            blocks[:, at : at + nbytes] = stream.reshape(-1, nbytes)
            at += nbytes
        return [out]


#: How hard a stream can be searched for repetitions.
LEVELS = range(1, 20)


def zstd_mode(level: int) -> str:
    """The mode that searches so hard. Raises ConfigError."""
    if level not in LEVELS:
        raise ConfigError(f"level {level}: there are {LEVELS[0]} to {LEVELS[-1]}")
    return f"zstd-{level}"


#: "huffman" finds no matches, so that only literals are coded: twice as fast as a level that searches
#: for repetitions, and denser, since float rows have none.
_MODES: Mapping[str, zstandard.ZstdCompressionParameters | None] = {
    "stored": None,
    "huffman": zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_FAST,
        min_match=7,
        hash_log=6,
        chain_log=6,
        window_log=18,
        search_log=1,
        target_length=0,
        write_content_size=True,
    ),
    **{
        zstd_mode(level): zstandard.ZstdCompressionParameters.from_level(level, write_content_size=True)
        for level in LEVELS
    },
}


@dataclass(frozen=True, slots=True)
class Entropy:
    """Each stream packed by its mode; stored as it is where that does not make it smaller."""

    modes: tuple[str, ...]
    name = "entropy"

    @property
    def config(self) -> Mapping[str, object]:
        return {"modes": list(self.modes)}

    def searching(self, mode: str) -> Entropy:
        """The same with streams that were searched for repetitions packed by `mode`."""
        return Entropy(tuple(mode if each.startswith("zstd-") else each for each in self.modes))

    def sizes(self, sizes: list[int], grid: Grid) -> list[int]:
        if len(sizes) != len(self.modes):
            raise Corrupt("codec entropy: as many modes as streams are needed")
        return sizes

    def encode(self, streams: Streams, grid: Grid) -> Streams:
        return [_packed(mode, stream) for mode, stream in zip(self.modes, streams, strict=True)]

    def decode(self, streams: Streams, sizes: list[int], grid: Grid, buffers: Buffers = NEW) -> Streams:
        return [_unpacked(stream, size, buffers) for stream, size in zip(streams, sizes, strict=True)]


def _packed(mode: str, stream: Stream) -> Stream:
    parameters = _MODES[mode]
    if parameters is None or not len(stream):
        return stream
    packed = zstandard.ZstdCompressor(compression_params=parameters).compress(stream.data)
    return np.frombuffer(packed, np.uint8) if len(packed) < len(stream) else stream


def _unpacked(stream: Stream, nbytes: int, buffers: Buffers) -> Stream:
    """`nbytes` bytes, from a frame that says so before anything is allocated."""
    if len(stream) == nbytes:
        return stream
    if len(stream) > nbytes:
        raise Corrupt("codec entropy: a stream is larger than what it holds")
    try:
        frame = zstandard.get_frame_parameters(stream.data)
        if frame.content_size != nbytes or frame.dict_id:
            raise Corrupt("codec entropy: a frame of another size than the rows need")
        if _frame_nbytes(stream, frame.has_checksum) != len(stream):
            raise Corrupt("codec entropy: more than one frame, or less")
        found = buffers.take(nbytes)
        with zstandard.ZstdDecompressor().stream_reader(stream.data) as reader:
            num_found = reader.readinto(found.data)
    except zstandard.ZstdError as error:
        raise Corrupt(f"codec entropy: {error}") from error
    if num_found != nbytes:
        raise Corrupt("codec entropy: a frame that is cut off")
    return found


def _frame_nbytes(stream: Stream, has_checksum: bool) -> int:
    """How long the frame is that `stream` begins with, by the headers of its blocks (RFC 8878, 3.1.1): into a
    given buffer the library unpacks as a stream alone, and then does not tell what follows."""
    at, last = zstandard.frame_header_size(stream.data), False
    while not last and at < len(stream):
        header = int.from_bytes(stream[at : at + _BLOCK_HEADER].tobytes(), "little")
        last, block_type, nbytes = bool(header & 1), header >> 1 & 3, header >> 3
        at += _BLOCK_HEADER + (1 if block_type == _ONE_BYTE_REPEATED else nbytes)
    return at + (_CHECKSUM if has_checksum else 0)


_BLOCK_HEADER, _CHECKSUM = 3, 4
_ONE_BYTE_REPEATED = 1


def _float_split(config: Mapping[str, object]) -> Codec:
    word = config["word"]
    if type(word) is not int or word not in (2, 4):
        raise ValueError(word)
    return FloatSplit(word)


def _fields(config: Mapping[str, object]) -> Codec:
    field_nbytes = _listed(config["sizes"])
    if not all(type(nbytes) is int and 0 < nbytes <= MAX_FIELD_NBYTES for nbytes in field_nbytes):
        raise ValueError(field_nbytes)
    return Fields(field_nbytes)


def _entropy(config: Mapping[str, object]) -> Codec:
    modes = _listed(config["modes"])
    for mode in modes:
        if mode not in _MODES:
            raise UnknownFeature(f"codec entropy: unknown mode {mode!r}", codec="entropy")
    return Entropy(modes)


def _listed(value: object) -> tuple[Any, ...]:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_STREAMS:
        raise ValueError(value)
    return tuple(value)


#: name -> (keys of its config, the codec of such a config)
_CODECS: Mapping[str, tuple[set[str], Callable[[Mapping[str, object]], Codec]]] = {
    "float-split": ({"word"}, _float_split),
    "channel-offset": (set(), lambda config: ChannelOffset()),
    "fields": ({"sizes"}, _fields),
    "entropy": ({"modes"}, _entropy),
}


def codec_named(name: str, config: Mapping[str, object]) -> Codec:
    """The codec that a blob names. Raises UnknownFeature for one that this build has not, Corrupt for a
    config that the codec does not take."""
    if name not in _CODECS:
        raise UnknownFeature(f"a codec that this build does not know: {name!r}", codec=name)
    keys, made = _CODECS[name]
    try:
        if config.keys() != keys:
            raise ValueError(config)
        return made(config)
    except (TypeError, ValueError) as error:  # TypeError: a mode that cannot be looked up
        raise Corrupt(f"codec {name}: a config that it does not take") from error
