"""The interface of a memory: what a sequence has left behind, in one of the members of the family.

A memory is asked to *plan* a batch; the plan is one transaction over all its sub-caches. Each ubatch of
the plan is applied, computed, and in the end the plan is committed or rolled back; after a rollback the
memory is as if the plan had never been.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.batch import Batch, Ints, Ubatch
from engine.rope import Rotary
from engine.state import Layout, Point, Rows, SeqId


@dataclass(frozen=True, slots=True)
class WindowSpec:
    """A sliding window. `standard`: the last `size` tokens, the query's own among them.
    `chunked`: tokens from the query's last multiple of `size` on. Symmetric windows cannot be said here:
    a token that later ones change has no row that is written once."""

    size: int
    chunked: bool = False

    def first_visible(self, positions: Ints) -> Ints:
        """The first position that a query at each of `positions` may see."""
        if self.chunked:
            return positions // self.size * self.size
        return np.maximum(0, positions - self.size + 1)

    def needed_from(self, position: int) -> int:
        """The first row that a sequence must still have to go on at `position`: the law of window rows, by
        which states are stored too. What may be seen can begin later, but who has only that could go on and
        not be saved."""
        return max(0, position - self.size)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one attention layer caches. `rotary` is None for layers without RoPE."""

    layer: int
    num_kv_heads: int
    head_size_k: int
    head_size_v: int
    rotary: Rotary | None
    window: WindowSpec | None = None


@dataclass(frozen=True, slots=True)
class MemorySpec:
    """What the model and the configuration ask of a memory, resolved.

    `num_cells` counts the cells of a full cache, all sequences together; `num_seqs` how many sequences
    can live at once; `max_batch` the most tokens of one plan; `max_ubatch` of one pass.
    `full_windows` keeps window layers as large as full ones, so that they can be rewound and shifted.
    """

    layers: tuple[LayerSpec, ...]
    num_cells: int
    num_seqs: int
    max_batch: int
    max_ubatch: int
    type_k: str
    type_v: str
    dtype: torch.dtype  # of the q, k, v that come in and of the rows that attention reads
    device: torch.device
    full_windows: bool = False


class View(Protocol):
    """One applied ubatch, as the layers of the model see the memory."""

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Store this ubatch's rows and attend over all that each token may see.

        q: [tokens, heads, head_size_k], k: [tokens, kv heads, head_size_k], v: [tokens, kv heads,
        head_size_v], RoPE applied. Returns [tokens, heads, head_size_v] in q's dtype. The result does
        not depend on physical cell order: rows are read in position order, with a fixed reduction.
        """
        ...


class Plan(Protocol):
    """A batch that fits. Apply every ubatch in order, then commit, or roll back."""

    @property
    def ubatches(self) -> tuple[Ubatch, ...]: ...

    def apply(self, index: int) -> View:
        """Make the cells of ubatch `index` visible, and return the model's view of it."""
        ...

    def commit(self) -> None: ...

    def rollback(self) -> None:
        """Undo every applied ubatch, window cells that were reused included."""
        ...


class Memory(Protocol):
    """A member of the family. `seq=None` means every sequence, everywhere that it is allowed;
    a range is [start, stop), with `stop=None` for open."""

    @property
    def layout(self) -> Layout: ...

    @property
    def rotated(self) -> tuple[bool, bool]:
        """Whether K, and V, rows are stored Hadamard-rotated (part of the fingerprint)."""
        ...

    def plan(self, batch: Batch) -> Plan:
        """Cut into ubatches and find their cells; nothing visible changes.

        Raises NoSlot when it does not fit, BatchRefused when positions do not follow the sequence.
        """
        ...

    def remove(self, seq: SeqId | None, start: int, stop: int | None) -> None:
        """Forget positions [start, stop). Raises EditRefused, and nothing changed, where what is left
        could not go on (a rewind beyond a window: see `can_resume_at`)."""
        ...

    def copy(self, source: SeqId, target: SeqId, start: int = 0, stop: int | None = None) -> None:
        """`target` (emptied) shares the cells of `source` in the range; no row is copied."""
        ...

    def keep(self, seq: SeqId) -> None:
        """Forget every other sequence."""
        ...

    def shift(self, seq: SeqId | None, start: int, stop: int | None, delta: int) -> None:
        """Move positions of [start, stop) by `delta`, keys re-rotated. Cells that another sequence
        also owns are copied first, so that it notices nothing. Raises EditRefused, NoSlot."""
        ...

    def discard(self, seq: SeqId, start: int, stop: int) -> None:
        """Forget positions [start, stop) and move those behind up, all or nothing. Raises as `shift`."""
        ...

    def divide(self, seq: SeqId | None, start: int, stop: int | None, divisor: int) -> None:
        """Integer-divide positions of [start, stop), keys re-rotated. Raises as `shift`."""
        ...

    def refuse_shift(self) -> str | None:
        """Why this memory cannot shift, or None if it can."""
        ...

    def pos_min(self, seq: SeqId) -> int | None: ...

    def pos_max(self, seq: SeqId) -> int | None: ...

    def can_resume_at(self, seq: SeqId, position: int) -> bool:
        """Whether the sequence, cut to [0, position), could go on exactly."""
        ...

    def free_cells(self) -> int:
        """Cells that a new token could take, in the fullest sub-cache."""
        ...

    def snapshot(self, seq: SeqId, since: int = 0) -> tuple[tuple[Rows, ...], tuple[Point, ...]]:
        """Rows of [since, length) and the point state, copied out; for window parts as far back
        (not before `since`) as memory has them. Raises EditRefused if positions are not 0…n-1."""
        ...

    def restore(
        self, seq: SeqId, tokens: tuple[int, ...], rows: tuple[Rows, ...], points: tuple[Point, ...]
    ) -> None:
        """Fill the empty sequence `seq` with the rows of `tokens`; `rows` holds consecutive runs of each
        kind, copied straight into the cells. All or nothing: after an error the sequence is empty.
        Raises NoSlot, StateError if rows or point state that are needed are missing or misshapen."""
        ...

    def tokens_at(self, seq: SeqId, start: int, stop: int) -> tuple[int, ...]:
        """Token ids of the cells at positions [start, stop), in order."""
        ...
