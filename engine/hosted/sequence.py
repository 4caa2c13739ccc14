"""One sequence of a hosted model: its cache, and the row that its window layers have just dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.cache.checks import check_rows
from engine.cache.points import Frozen
from engine.hosted.geometry import Cache, Geometry, RowsPart, fork
from engine.state import PartKind, Rows, Run


@dataclass(slots=True)
class HostedSequence:
    """`tokens` went through `cache`. `behind` has of every window part the one row before those of the cache,
    where it is known (else none): so the last token can be taken back, and computed again."""

    geometry: Geometry
    cache: Cache
    tokens: list[int]
    behind: tuple[torch.Tensor, ...]

    @classmethod
    def empty(cls, geometry: Geometry) -> HostedSequence:
        return cls(geometry, geometry.make(), [], tuple(part.empty(0) for part in geometry.windows))

    @classmethod
    def made(
        cls,
        geometry: Geometry,
        tokens: Sequence[int],
        rows: Sequence[torch.Tensor],
        windows: Sequence[torch.Tensor],
        states: Sequence[torch.Tensor],
    ) -> HostedSequence:
        """Of tensors that it may keep: token rows, the last window rows, at least as many as are needed, and
        states."""
        held = min(len(tokens), geometry.window)
        kept, behind = [], []
        for part, tensor in zip(geometry.windows, windows, strict=True):
            there = tensor.shape[part.law.tokens] - held
            extra = min(there, 1)
            behind.append(tensor.narrow(part.law.tokens, there - extra, extra).clone())
            kept.append(tensor.narrow(part.law.tokens, there, held))
        cache = geometry.filled(len(tokens), (*rows, *kept), states)
        return cls(geometry, cache, list(tokens), tuple(behind))

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def first(self) -> int:
        """The first position whose window rows are here."""
        return self.length - min(self.length, self.geometry.window) - self._num_behind

    def has_window(self, length: int) -> bool:
        """Whether all window rows are here that going on at `length` needs."""
        return not self.geometry.windows or self.first <= max(0, length - self.geometry.window)

    @property
    def _num_behind(self) -> int:
        behind = zip(self.geometry.windows, self.behind, strict=True)
        return min((tensor.shape[part.law.tokens] for part, tensor in behind), default=0)

    # --- tokens in ----------------------------------------------------------------------------

    def fork(self) -> HostedSequence:
        """Another one with the same past."""
        return HostedSequence(self.geometry, fork(self.cache), list(self.tokens), self.behind)

    def grow(self, before: HostedSequence, tokens: Sequence[int]) -> None:
        """`tokens`, no more of them than there are window rows, just went through the cache, which was as
        that of `before`. Raises CacheRefused where it is not now what it should be."""
        self.tokens += tokens
        self.geometry.check(self.cache, self.length)
        dropped = self.length - self.geometry.window - 1
        if dropped >= 0:
            at = dropped - before.first - before._num_behind
            self.behind = tuple(
                part.of(before.cache).narrow(part.law.tokens, at, 1).clone() for part in self.geometry.windows
            )

    # --- what was -----------------------------------------------------------------------------

    def freeze(self) -> Frozen:
        """Bytes of the window rows and the point state that are here: what `cut` goes back with."""
        windows = (self._window(part, tensor, self.first) for part, tensor in self._windows())
        return (*windows, *self.points())

    def cut(self, length: int, frozen: Frozen | None) -> HostedSequence:
        """Another one with the first `length` tokens alone. `frozen` is what was here when there were no more
        of them; None where the window rows are here, and there is no point state that is not."""
        if length == self.length:
            return self.fork()
        if length == 0:
            return HostedSequence.empty(self.geometry)
        geometry, num_windows = self.geometry, len(self.geometry.windows)
        rows = [part.of(self.cache).narrow(part.law.tokens, 0, length) for part in geometry.tokens]
        if frozen is None:
            windows = [
                tensor.narrow(part.law.tokens, 0, length - self.first) for part, tensor in self._windows()
            ]
            return HostedSequence.made(geometry, self.tokens[:length], rows, windows, ())
        windows = []
        for part, stored in zip(geometry.windows, frozen[:num_windows], strict=True):
            tensor = part.empty(len(stored))
            part.put(tensor, 0, stored)
            windows.append(tensor)
        states = [
            state.tensor(stored) for state, stored in zip(geometry.states, frozen[num_windows:], strict=True)
        ]
        return HostedSequence.made(geometry, self.tokens[:length], rows, windows, states)

    def _windows(self) -> list[tuple[RowsPart, torch.Tensor]]:
        """Of each window part all rows that are here, from `first` on."""
        found = []
        for part, behind in zip(self.geometry.windows, self.behind, strict=True):
            there = part.of(self.cache) if self.length else part.empty(0)
            found.append((part, torch.cat([behind, there], dim=part.law.tokens)))
        return found

    def _window(self, part: RowsPart, tensor: torch.Tensor, start: int) -> torch.Tensor:
        """uint8 [rows, row_nbytes] of a window part from position `start` on."""
        return part.as_bytes(tensor, start - self.first, self.length - self.first)

    # --- states -------------------------------------------------------------------------------

    def rows(self, since: int) -> tuple[Rows, ...]:
        """Copies of the token rows from `since` on, and of the window rows that are here."""
        found = []
        if self.geometry.tokens and since < self.length:
            parts = tuple(
                part.as_bytes(part.of(self.cache), since, self.length) for part in self.geometry.tokens
            )
            found.append(Rows(PartKind.TOKEN, since, self.length, parts))
        start = max(since, self.first)
        if self.geometry.windows and start < self.length:
            parts = tuple(self._window(part, tensor, start) for part, tensor in self._windows())
            found.append(Rows(PartKind.WINDOW, start, self.length, parts))
        return tuple(found)

    def points(self) -> Frozen:
        """Copies of the point state."""
        return tuple(state.as_bytes(self.cache) for state in self.geometry.states)


def read(
    geometry: Geometry, runs: Sequence[Run], kind: PartKind, start: int, stop: int
) -> list[torch.Tensor]:
    """Tensors with the rows [start, stop) of the parts of a kind. The parts of each run are asked for once,
    one after the other. Raises StateError where they are misshapen, and what reading raises."""
    parts = geometry.rows_of(kind)
    specs = tuple(part.spec for part in parts)
    tensors = [part.empty(stop - start) for part in parts]
    for run in runs:
        if run.kind is not kind or run.stop <= start:
            continue
        stored = run.parts
        check_rows(specs, run, stored)
        skip = max(0, start - run.start)
        for part, tensor, rows in zip(parts, tensors, stored, strict=True):
            part.put(tensor, run.start + skip - start, rows[skip:])
    return tensors
