"""Which rows a state has when it is cut into chunks anew: worked out of a manifest alone, nothing is read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from engine.state import Layout, PartKind, parts_of
from serialization.chunks import rows_nbytes
from serialization.reencode.reencoding import Windows
from serialization.refs import ROW_KINDS, Checkpoint, Stored
from serialization.resume import max_window, needed_window, window_runs


@dataclass(frozen=True, slots=True)
class Piece:
    """The rows of one kind of the new chunk that begins at `chunk`: those of tokens [start, stop)."""

    kind: PartKind
    chunk: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Outline:
    """The new chunks of the first `length` tokens of what is `stored`, of `chunk_tokens` each. Window rows
    are those from `first_window` on."""

    stored: Stored
    length: int
    chunk_tokens: int
    first_window: int

    @classmethod
    def of(cls, stored: Stored, length: int, chunk_tokens: int, windows: Windows | None) -> Outline:
        first = needed_window(stored.layout, length) if windows is Windows.NEEDED else 0
        return cls(stored, length, chunk_tokens, first)

    def starts(self) -> range:
        """Where the chunks begin."""
        return range(0, self.length, self.chunk_tokens)

    def pieces(self) -> Iterator[Piece]:
        """Chunk by chunk; where not all rows of a chunk are there, it has none of that kind, or of windows
        the last ones."""
        runs = {kind: self._runs(kind) for kind in ROW_KINDS}
        for chunk in self.starts():
            stop = min(chunk + self.chunk_tokens, self.length)
            for kind in ROW_KINDS:
                start = self._start(kind, runs[kind], chunk, stop)
                specs = parts_of(self.stored.layout, kind)
                if start is not None and rows_nbytes(specs, start, stop):
                    yield Piece(kind, chunk, start, stop)

    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """Those of what is stored, without those that cannot be resumed for want of window rows."""
        window = max_window(self.stored.layout)
        return tuple(
            each
            for each in self.stored.checkpoints
            if each.position <= self.length and max(0, each.position - window) >= self.first_window
        )

    def _start(self, kind: PartKind, runs: list[tuple[int, int]], chunk: int, stop: int) -> int | None:
        """The first token of the rows in [chunk, stop) that reach its end; None without any."""
        at = bisect_left(runs, stop, key=lambda run: run[0])
        if not at or runs[at - 1][1] < stop:
            return None
        first = runs[at - 1][0]
        if kind is PartKind.WINDOW:
            start = max(first, chunk, self.first_window)
            return start if start < stop else None
        return chunk if first <= chunk else None

    def _runs(self, kind: PartKind) -> list[tuple[int, int]]:
        """Runs of tokens whose rows of this kind are named."""
        if kind is PartKind.WINDOW:
            return window_runs(self.stored.chunks)
        specs = parts_of(self.stored.layout, kind)
        runs: list[tuple[int, int]] = []
        for chunk in self.stored.chunks:
            if chunk.blob(kind) is None and (not specs or rows_nbytes(specs, chunk.start, chunk.stop)):
                continue
            if runs and runs[-1][1] == chunk.start:
                runs[-1] = (runs[-1][0], chunk.stop)
            else:
                runs.append((chunk.start, chunk.stop))
        return runs


def nbytes_of(layout: Layout, piece: Piece) -> int:
    """What the piece's rows take in this layout, before encoding."""
    return rows_nbytes(parts_of(layout, piece.kind), piece.start, piece.stop)
