"""Lossless codecs: frozen values that turn a list of byte streams into another, and back.

A pipeline is a tuple of them, recorded in the blob, so that any reader rebuilds it (docs/format.md,
section 4.2). A section of rows begins as one stream; every step works on the whole section at once.

The float codecs follow what is known of KV rows: the exponent byte has about 2.6 bits of entropy (less
once the channel's own scale is taken off), sign and fraction have nearly none to give.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import zstandard

from engine.errors import Corrupt, UnknownFeature
from engine.state import DTYPES
from serialization.limits import MAX_FIELD_NBYTES, MAX_STREAMS

Stream = npt.NDArray[np.uint8]  # one axis, contiguous
Streams = list[Stream]

#: values that are put together at a time: what a core's own cache holds
_TILE = 131_072


@dataclass(frozen=True, slots=True)
class Grid:
    """What a section is: parts of one dtype. `runs` are (num_parts, num_rows, values in a row)."""

    dtype: str
    runs: tuple[tuple[int, int, int], ...]

    @property
    def num_values(self) -> int:
        return sum(parts * rows * channels for parts, rows, channels in self.runs)

    @property
    def nbytes(self) -> int:
        nbytes, values = DTYPES[self.dtype]
        return self.num_values // values * nbytes


class Codec(Protocol):
    """One reversible step.

    `sizes` tells the streams' sizes after the step from those before (for an entropy step: unpacked);
    `decode(streams, sizes, grid)` gets the sizes before the step and returns streams of just those sizes,
    or raises Corrupt. Streams that are given are never changed; they may be handed on.
    """

    @property
    def name(self) -> str: ...

    @property
    def config(self) -> Mapping[str, object]: ...

    def sizes(self, sizes: list[int], grid: Grid) -> list[int]: ...

    def encode(self, streams: Streams, grid: Grid) -> Streams: ...

    def decode(self, streams: Streams, sizes: list[int], grid: Grid) -> Streams: ...


def _expected(streams: Streams, sizes: list[int]) -> Streams:
    """`streams`, if they have just these sizes. Raises Corrupt."""
    if [len(stream) for stream in streams] != sizes:
        raise Corrupt("codec: streams of other sizes than its step makes")
    return streams


@dataclass(frozen=True, slots=True)
class FloatSplit:
    """Exponent byte and the rest of every float, apart. `word` is the float's size in bytes."""

    word: int
    name = "float-split"

    @property
    def config(self) -> Mapping[str, object]:
        return {"word": self.word}

    def sizes(self, sizes: list[int], grid: Grid) -> list[int]:
        if len(sizes) != 1 or sizes[0] % self.word:
            raise Corrupt("codec float-split: not one stream of whole floats")
        num_values = sizes[0] // self.word
        return [num_values, num_values * (self.word - 1)]

    def encode(self, streams: Streams, grid: Grid) -> Streams:
        if self.word == 2:
            bits = streams[0].view("<u2")
            exponent, rest, sign = (np.empty(len(bits), np.uint8) for _ in range(3))
            np.right_shift(bits, 7, out=exponent, casting="unsafe")
            np.bitwise_and(bits, 0x7F, out=rest, casting="unsafe")
            np.right_shift(bits, 8, out=sign, casting="unsafe")
            sign &= 0x80
            rest |= sign
            return [exponent, rest]
        wide = streams[0].view("<u4")
        planes = np.empty((3, len(wide)), np.uint8)
        planes[0] = ((wide >> 16) & 0x7F) | ((wide >> 24) & 0x80)
        planes[1] = (wide >> 8) & 0xFF
        planes[2] = wide & 0xFF
        return [((wide >> 23) & 0xFF).astype(np.uint8), planes.reshape(-1)]

    def decode(self, streams: Streams, sizes: list[int], grid: Grid) -> Streams:
        exponent, rest = _expected(streams, self.sizes(sizes, grid))
        out = np.empty(sizes[0], np.uint8)
        join = _join_halves if self.word == 2 else _join_words
        join(exponent, rest, out)
        return [out]


def _join_halves(exponent: Stream, rest: Stream, out: Stream) -> None:
    """out (16-bit floats) from bits 14…7 in `exponent` and bits 15, 6…0 in `rest`."""
    words, signed = out.view("<i2"), rest.view(np.int8)
    shifted = np.empty(min(_TILE, len(words)), np.int16)
    for start in range(0, len(words), _TILE):
        tile = words[start : start + _TILE]
        high = shifted[: len(tile)]
        tile[...] = signed[start : start + _TILE]  # sign-extended: bit 7 is in 15…7 now
        tile &= -0x7F81  # 0x807f: keep bits 15 and 6…0
        high[...] = exponent[start : start + _TILE]
        high <<= 7
        tile |= high


def _join_words(exponent: Stream, rest: Stream, out: Stream) -> None:
    """out (32-bit floats) from bits 30…23 in `exponent` and the three planes of `rest`."""
    words, planes = out.view("<u4"), rest.reshape(3, -1)
    shifted = np.empty(min(_TILE, len(words)), np.uint32)
    for start in range(0, len(words), _TILE):
        tile = words[start : start + _TILE]
        high = shifted[: len(tile)]
        tile[...] = planes[0, start : start + _TILE]
        high[...] = tile
        high &= 0x80
        high <<= 24
        tile &= 0x7F
        tile <<= 16
        tile |= high
        for plane, shift in ((planes[1], 8), (planes[2], 0), (exponent, 23)):
            high[...] = plane[start : start + _TILE]
            high <<= shift
            tile |= high


@dataclass(frozen=True, slots=True)
class ChannelOffset:
    """The first stream less, for each channel of each part, its mean exponent (modulo 256)."""

    name = "channel-offset"

    @property
    def config(self) -> Mapping[str, object]:
        return {}

    def sizes(self, sizes: list[int], grid: Grid) -> list[int]:
        if not sizes or sizes[0] != grid.num_values:
            raise Corrupt("codec channel-offset: the first stream is not one byte a value")
        return [*sizes, sum(parts * channels for parts, rows, channels in grid.runs if rows)]

    def encode(self, streams: Streams, grid: Grid) -> Streams:
        exponent = np.empty_like(streams[0])
        offsets = np.empty(self.sizes([len(stream) for stream in streams], grid)[-1], np.uint8)
        before = _by_run(streams[0], grid)
        for values, taken, result in zip(
            before, _offsets_by_run(offsets, grid), _by_run(exponent, grid), strict=True
        ):
            taken[...] = _means(values)
            np.subtract(values, taken, out=result)
        return [exponent, *streams[1:], offsets]

    def decode(self, streams: Streams, sizes: list[int], grid: Grid) -> Streams:
        streams = _expected(streams, self.sizes(sizes, grid))
        exponent = np.empty_like(streams[0])
        for values, taken, result in zip(
            _by_run(streams[0], grid),
            _offsets_by_run(streams[-1], grid),
            _by_run(exponent, grid),
            strict=True,
        ):
            np.add(values, taken, out=result)
        return [exponent, *streams[1:-1]]


def _means(values: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """[parts, 1, channels], rounded, of [parts, rows, channels]: as dense as the median, at a tenth of
    its cost."""
    num_rows = values.shape[1]
    narrow = num_rows * 255 + num_rows // 2 < 2**16  # all rows of a chunk: twice as fast
    sums = np.add.reduce(values, axis=1, keepdims=True, dtype=np.uint16 if narrow else np.uint32)
    means: npt.NDArray[np.uint8] = ((sums + num_rows // 2) // num_rows).astype(np.uint8)
    return means


def _by_run(stream: Stream, grid: Grid) -> list[npt.NDArray[np.uint8]]:
    """Views [parts, rows, channels] of a stream with one byte a value; runs without rows left out."""
    views, at = [], 0
    for parts, rows, channels in grid.runs:
        size = parts * rows * channels
        if rows:
            views.append(stream[at : at + size].reshape(parts, rows, channels))
        at += size
    return views


def _offsets_by_run(offsets: Stream, grid: Grid) -> list[npt.NDArray[np.uint8]]:
    """Views [parts, 1, channels], in the same order."""
    views, at = [], 0
    for parts, rows, channels in grid.runs:
        if rows:
            views.append(offsets[at : at + parts * channels].reshape(parts, 1, channels))
            at += parts * channels
    return views


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

    def decode(self, streams: Streams, sizes: list[int], grid: Grid) -> Streams:
        streams = _expected(streams, self.sizes(sizes, grid))
        out = np.empty(sizes[0], np.uint8)
        blocks, at = out.reshape(-1, sum(self.field_nbytes)), 0
        for stream, nbytes in zip(streams, self.field_nbytes, strict=True):
            blocks[:, at : at + nbytes] = stream.reshape(-1, nbytes)
            at += nbytes
        return [out]


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
    "zstd-1": zstandard.ZstdCompressionParameters.from_level(1, write_content_size=True),
}


@dataclass(frozen=True, slots=True)
class Entropy:
    """Each stream packed by its mode; stored as it is where that does not make it smaller."""

    modes: tuple[str, ...]
    name = "entropy"

    @property
    def config(self) -> Mapping[str, object]:
        return {"modes": list(self.modes)}

    def sizes(self, sizes: list[int], grid: Grid) -> list[int]:
        if len(sizes) != len(self.modes):
            raise Corrupt("codec entropy: as many modes as streams are needed")
        return sizes

    def encode(self, streams: Streams, grid: Grid) -> Streams:
        return [_packed(mode, stream) for mode, stream in zip(self.modes, streams, strict=True)]

    def decode(self, streams: Streams, sizes: list[int], grid: Grid) -> Streams:
        return [_unpacked(stream, size) for stream, size in zip(streams, sizes, strict=True)]


def _packed(mode: str, stream: Stream) -> Stream:
    parameters = _MODES[mode]
    if parameters is None or not len(stream):
        return stream
    packed = zstandard.ZstdCompressor(compression_params=parameters).compress(stream.data)
    return np.frombuffer(packed, np.uint8) if len(packed) < len(stream) else stream


def _unpacked(stream: Stream, nbytes: int) -> Stream:
    """`nbytes` bytes, from a frame that says so before anything is allocated."""
    if len(stream) == nbytes:
        return stream
    if len(stream) > nbytes:
        raise Corrupt("codec entropy: a stream is larger than what it holds")
    try:
        frame = zstandard.get_frame_parameters(stream.data)
        if frame.content_size != nbytes or frame.dict_id:
            raise Corrupt("codec entropy: a frame of another size than the rows need")
        found = zstandard.ZstdDecompressor().decompress(stream.data, nbytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Corrupt(f"codec entropy: {error}") from error
    if len(found) != nbytes:
        raise Corrupt("codec entropy: a frame that is cut off")
    return np.frombuffer(found, np.uint8)


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
