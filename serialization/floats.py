"""The codecs of floats: exponents apart from signs and fractions, and less their channel's mean.

KV rows have about 2.9 bits of entropy in the exponent byte, 2.6 once the channel's own scale is taken off;
sign and fraction have nearly none to give.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.errors import Corrupt
from serialization.buffers import NEW, Buffers, Stream
from serialization.streams import Grid, Streams, expected

#: values that are put together at a time: what a core's own cache holds
_TILE = 131_072


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

    def decode(self, streams: Streams, sizes: list[int], grid: Grid, buffers: Buffers = NEW) -> Streams:
        exponent, rest = expected(streams, self.sizes(sizes, grid))
        out = buffers.take(sizes[0])
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

    def decode(self, streams: Streams, sizes: list[int], grid: Grid, buffers: Buffers = NEW) -> Streams:
        streams = expected(streams, self.sizes(sizes, grid))
        exponent = buffers.take(len(streams[0]))
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
