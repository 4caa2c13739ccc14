"""A memory without cells: a draft that reads what a target's layers have stored.

Draft models that have queries alone (Gemma 4's assistant) look at the rows of the model that they draft for.
They see that model's cells by reference, and a token of theirs takes none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch

from engine.batch import Batch, Ints, Segment, Ubatch, counts_of, split_simple
from engine.cache.memory import KEYS, Chosen, Held, View
from engine.cache.parts_memory import PartsMemory
from engine.errors import BatchRefused, ConfigError, EditRefused, StateError
from engine.state import Layout, Point, Rows, Run, SeqId


class BorrowedMemory:
    """See `memory.Memory`. Sequences, lengths and room are the source's at any time, whichever of the two was
    made or filled first. Every edit raises EditRefused: it is the source that is edited."""

    def __init__(self, source: PartsMemory, layers: Mapping[int, int]) -> None:
        """`layers` says which layer of `source` each layer of the borrower reads. Raises ConfigError for one
        that has no keys there."""
        for layer, lent in layers.items():
            if not source.has_part(KEYS, lent):
                raise ConfigError(f"layer {layer} borrows from layer {lent}, which has no part {KEYS}")
        self._source = source
        self._layers = dict(layers)

    @property
    def layout(self) -> Layout:
        return ()

    @property
    def rotated(self) -> tuple[str, ...]:
        return ()

    def plan(self, batch: Batch) -> BorrowedPlan:
        """A batch at positions that rise by one within a sequence, up to where its next token would go: every
        step of a draft may be at that place. Never raises NoSlot; BatchRefused where rows that a token may
        see are not there."""
        spec, source = self._source.spec, self._source
        if not 0 < len(batch) <= spec.max_batch:
            raise BatchRefused(f"a batch of {len(batch)} tokens: it can have 1 to {spec.max_batch}")
        for seq, _ in counts_of(batch):
            if not 0 <= seq < spec.num_seqs:
                raise BatchRefused(f"no sequence {seq}: there are {spec.num_seqs}")
            positions = batch.positions[batch.seqs == seq]
            if bool((positions[1:] - positions[:-1] != 1).any()):
                raise BatchRefused(f"positions of sequence {seq} must go on without a hole")
            # Later tokens see later rows: what the first one needs is the most, and the last one is furthest.
            for position in (int(positions[0]), int(positions[-1])):
                if not source.can_read_at(seq, position, self._layers.values()):
                    raise BatchRefused(f"sequence {seq} has no rows that a token at {position} could read")
        return BorrowedPlan(source, self._layers, split_simple(batch, spec.max_ubatch))

    # -- edits -------------------------------------------------------------------------------------

    def remove(self, seq: SeqId | None, start: int, stop: int | None) -> None:
        _refuse()

    def copy(self, source: SeqId, target: SeqId, start: int = 0, stop: int | None = None) -> None:
        _refuse()

    def keep(self, seq: SeqId) -> None:
        _refuse()

    def shift(self, seq: SeqId | None, start: int, stop: int | None, delta: int) -> None:
        _refuse()

    def discard(self, seq: SeqId, start: int, stop: int) -> None:
        _refuse()

    def divide(self, seq: SeqId | None, start: int, stop: int | None, divisor: int) -> None:
        _refuse()

    def refuse_shift(self) -> str | None:
        return READ_ONLY

    # -- questions ---------------------------------------------------------------------------------

    def pos_min(self, seq: SeqId) -> int | None:
        return self._source.pos_min(seq)

    def pos_max(self, seq: SeqId) -> int | None:
        return self._source.pos_max(seq)

    def can_resume_at(self, seq: SeqId, position: int) -> bool:
        return self._source.can_resume_at(seq, position)

    def last_resumable(self, seq: SeqId, at_most: int) -> int:
        return self._source.last_resumable(seq, at_most)

    def drops_rows(self) -> bool:
        return self._source.drops_rows()

    def free_cells(self) -> int:
        return self._source.free_cells()

    def tokens_at(self, seq: SeqId, start: int, stop: int) -> tuple[int, ...]:
        return self._source.tokens_at(seq, start, stop)

    # -- states ------------------------------------------------------------------------------------

    def mark(self, seq: SeqId) -> None:
        """Nothing: there is no point state here."""

    def snapshot(self, seq: SeqId, since: int = 0) -> tuple[tuple[Rows, ...], tuple[Point, ...]]:
        """Nothing: the rows are in the source's state."""
        return (), ()

    def restore(
        self, seq: SeqId, tokens: tuple[int, ...], rows: Sequence[Run], points: tuple[Point, ...]
    ) -> None:
        """Nothing, before or after the source is restored. Raises StateError for rows or point state."""
        if rows or points:
            raise StateError(f"the state has rows for a memory that has none: {READ_ONLY}")

    def replace(
        self, seq: SeqId, tokens: tuple[int, ...], rows: Sequence[Run], points: tuple[Point, ...]
    ) -> None:
        """As `restore`."""
        self.restore(seq, tokens, rows, points)


class BorrowedPlan:
    """See `memory.Plan`. There is nothing to keep or to undo."""

    def __init__(self, source: PartsMemory, layers: Mapping[int, int], ubatches: tuple[Ubatch, ...]) -> None:
        self.ubatches = ubatches
        self._source = source
        self._layers = layers

    def apply(self, index: int) -> BorrowedView:
        return BorrowedView(self._source.lend(self.ubatches[index]), self._layers)

    def commit(self) -> None:
        pass

    def rollback(self) -> None:
        pass


class BorrowedView:
    """See `memory.View`: another memory's rows by the borrower's numbers of layers. What would store
    something raises EditRefused. It is good until the source changes."""

    def __init__(self, view: View, layers: Mapping[int, int]) -> None:
        self._view = view
        self._layers = layers

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self._view.segments

    @property
    def positions(self) -> Ints:
        return self._view.positions

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        scale: float,
        softcap: float | None = None,
        *,
        sinks: torch.Tensor | None = None,
        chosen: Chosen | None = None,
    ) -> torch.Tensor:
        if k is not None or v is not None:
            _refuse()
        lent = self._layers[layer]
        return self._view.attend(lent, q, None, None, scale, softcap, sinks=sinks, chosen=chosen)

    def append(self, name: str, layer: int, rows: torch.Tensor) -> None:
        _refuse()

    def held(self, name: str, layer: int, segment: Segment) -> Held:
        return self._view.held(name, self._layers[layer], segment)

    def into_basis(self, name: str, layer: int, x: torch.Tensor) -> torch.Tensor:
        return self._view.into_basis(name, self._layers[layer], x)

    def close(self, name: str, layer: int, segment: Segment, rows: torch.Tensor) -> None:
        _refuse()

    def blocks(self, name: str, layer: int, segment: Segment) -> torch.Tensor:
        return self._view.blocks(name, self._layers[layer], segment)

    def point(self, name: str, layer: int) -> torch.Tensor:
        """Not lent: it is true at the source's end alone."""
        raise EditRefused(f"no point state can be borrowed: {READ_ONLY}")

    @property
    def newest(self) -> int:
        return self._view.newest

    def set_point(self, name: str, layer: int, states: torch.Tensor) -> None:
        _refuse()

    def previous_tokens(self, count: int) -> Ints:
        return self._view.previous_tokens(count)


READ_ONLY = "it only reads the rows of the model that it drafts for"


def _refuse() -> NoReturn:
    raise EditRefused(f"a borrowed memory cannot be changed: {READ_ONLY}")
