"""Streams: what codecs turn into one another, and the interface that every codec has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from engine.errors import Corrupt
from engine.state import DTYPES
from serialization.buffers import NEW, Buffers, Stream

Streams = list[Stream]


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
    or raises Corrupt. Streams that are given are never changed; they may be handed on. What it makes lies in
    memory that it takes from `buffers`.
    """

    @property
    def name(self) -> str: ...

    @property
    def config(self) -> Mapping[str, object]: ...

    def sizes(self, sizes: list[int], grid: Grid) -> list[int]: ...

    def encode(self, streams: Streams, grid: Grid) -> Streams: ...

    def decode(self, streams: Streams, sizes: list[int], grid: Grid, buffers: Buffers = NEW) -> Streams: ...


def expected(streams: Streams, sizes: list[int]) -> Streams:
    """`streams`, if they have just these sizes. Raises Corrupt."""
    if [len(stream) for stream in streams] != sizes:
        raise Corrupt("codec: streams of other sizes than its step makes")
    return streams
