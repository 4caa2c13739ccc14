"""The interface of a memory: what a sequence has left behind, in one of the members of the family.

A model declares the parts that it needs (`MemoryNeeds`), each of one of the four kinds; the kind that it
names says which parts belong together (`table.py`). A memory is asked to *plan* a batch; the plan is one
transaction over all its parts. Each ubatch of the plan is applied, computed, and in the end the plan is
committed or rolled back; after a rollback the memory is as if the plan had never been.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol

import numpy as np
import torch

from engine.batch import Batch, Ints, Segment, Ubatch
from engine.rope import Rotary
from engine.state import Layout, Point, Rows, Run, SeqId

#: In place of the id of a token that has none: media, and what comes before the first token.
NULL_TOKEN = -1


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
class Turned:
    """The values of every head that RoPE turned before the row was stored: `rotary.n_rot` from `start` on,
    feature i with feature i + n_rot/2. Who moves a row turns them further."""

    rotary: Rotary
    start: int = 0


class Basis(StrEnum):
    """When rows are stored Hadamard-rotated."""

    PLAIN = "plain"  # never
    QUANTIZED = "quantized"  # where the dtype is a quantized one, and the size has a block for it
    ROTATED = "rotated"  # whatever the dtype


#: The setting that a part's dtype comes from.
DtypeField = Literal["type_k", "type_v"]


@dataclass(frozen=True, slots=True)
class RowsSpec:
    """One row a token, [heads, size]: token rows, or window rows where there is a `window`. The first
    `value_size` values of keys that have no rows of values beside them are the values. Ranks that hold a
    model together share the heads of rows that are `split`, and each has all of the others."""

    name: str
    layer: int
    heads: int
    size: int
    field: DtypeField = "type_k"
    turned: Turned | None = None
    window: WindowSpec | None = None
    basis: Basis = Basis.QUANTIZED
    value_size: int | None = None
    split: bool = False

    @property
    def rotated_sizes(self) -> tuple[int, ...]:
        """Leading parts of a head that each stay among themselves when the row is Hadamard-rotated."""
        return (self.size,) if self.value_size is None else (self.size, self.value_size)


@dataclass(frozen=True, slots=True)
class BlocksSpec:
    """One row [size] for every closed block of `block` tokens, counted from position 0."""

    name: str
    layer: int
    size: int
    block: int
    field: DtypeField = "type_k"
    basis: Basis = Basis.QUANTIZED


@dataclass(frozen=True, slots=True)
class PointSpec:
    """float32 values of `shape`, true at one position; zeros before the first token."""

    name: str
    layer: int
    shape: tuple[int, ...]


PartNeed = RowsSpec | BlocksSpec | PointSpec

#: Rows that `View.attend` writes and reads.
KEYS, VALUES = "kv.k", "kv.v"


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """What a model asks to be remembered: a kind of the table of kinds, and its parts."""

    kind: str
    parts: tuple[PartNeed, ...]


def keys_and_values(
    layer: int,
    num_kv_heads: int,
    head_size_k: int,
    head_size_v: int,
    rotary: Rotary | None,
    window: WindowSpec | None = None,
    split: bool = True,
) -> tuple[RowsSpec, RowsSpec]:
    """The two parts of a layer of plain attention, all heads of it; RoPE turns the first values of a head."""
    turned = None if rotary is None else Turned(rotary)
    keys = RowsSpec(KEYS, layer, num_kv_heads, head_size_k, "type_k", turned, window, split=split)
    return keys, RowsSpec(VALUES, layer, num_kv_heads, head_size_v, "type_v", None, window, split=split)


@dataclass(frozen=True, slots=True)
class MemorySpec:
    """What the model and the configuration ask of a memory, resolved.

    `num_cells` counts the cells of a full cache, all sequences together; `num_seqs` how many sequences
    can live at once; `max_batch` the most tokens of one plan; `max_ubatch` of one pass.
    `full_windows` keeps window rows as long as full ones, so that they can be rewound and shifted.
    `keep_tail` tokens at the end of each sequence of a batch are computed in one pass, where sequences
    are computed side by side. `checkpoint_bytes` bounds the point state kept beside the live one.
    `rollback` is how many steps back into its last batch a sequence keeps its point state, which takes up to
    `rollback` + 1 times the bytes of the live one. Tails are at least that long then, where they fit.
    `deterministic` cuts batches so that no row depends on those beside it: one token a pass where there is
    point state, and else passes with a place for every token.
    """

    needs: MemoryNeeds
    num_cells: int
    num_seqs: int
    max_batch: int
    max_ubatch: int
    type_k: str
    type_v: str
    dtype: torch.dtype  # of the rows that come in and of those that attention reads
    device: torch.device
    full_windows: bool = False
    keep_tail: int = 0
    checkpoint_bytes: int = 2**28
    rollback: int = 0
    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """Rows of one part and sequence in order: [n, heads, size] in the compute dtype and the stored basis,
    and the position of each."""

    rows: torch.Tensor
    positions: Ints


#: What queries may see beyond the causal law: for every segment, bool [queries, rows of the sequence in
#: position order] or [kv heads, queries, rows].
Chosen = Sequence[torch.Tensor]


class View(Protocol):
    """One applied ubatch, as the layers of a model see the memory. Parts go by the names they were given."""

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Runs of consecutive tokens of one sequence; where there is point state they are equally long."""
        ...

    @property
    def positions(self) -> Ints:
        """[tokens] of the ubatch."""
        ...

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
        """Store this ubatch's rows and attend over all that each token may see.

        q: [tokens, heads, head_size_k], k: [tokens, kv heads, head_size_k], v: [tokens, kv heads,
        head_size_v], RoPE applied. k None: the rows are there already (another layer's, in this pass).
        v None: they are as well, or the keys hold the values.
        `sinks`: float32 [heads] logits that join the softmax and have no value. `chosen` narrows what
        is visible. Returns [tokens, heads, head_size_v] in q's dtype. The result does not depend on
        physical cell order: rows are read in position order, with a fixed reduction.
        """
        ...

    def append(self, name: str, layer: int, rows: torch.Tensor) -> None:
        """Store this ubatch's rows [tokens, heads, size] of a part."""
        ...

    def held(self, name: str, layer: int, segment: Segment) -> Held:
        """Rows of a segment's sequence up to its last token: all of them, or for window rows those that
        the segment's first token may see, and what follows."""
        ...

    def into_basis(self, name: str, layer: int, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] in the basis that a part's rows are stored in, so that products with them hold."""
        ...

    def out_of_basis(self, name: str, layer: int, x: torch.Tensor) -> torch.Tensor:
        """What was made of a part's rows, x [..., size] in the basis that they are stored in, as it is."""
        ...

    def close(self, name: str, layer: int, segment: Segment, rows: torch.Tensor) -> None:
        """Store the rows [n, size] of the n blocks that close within a segment."""
        ...

    def blocks(self, name: str, layer: int, segment: Segment) -> torch.Tensor:
        """[n, size]: rows of all blocks that are closed when the segment ends, in order."""
        ...

    def point(self, name: str, layer: int) -> torch.Tensor:
        """float32 [segments, *shape]: point state before each segment's first token; not to be changed."""
        ...

    @property
    def newest(self) -> int:
        """How many states `set_point` is to be given of each segment: at least 1, at most its tokens."""
        ...

    def set_point(self, name: str, layer: int, states: torch.Tensor) -> None:
        """Point state, float32 [segments, newest, *shape], after each of the last tokens of each segment,
        oldest first: the last one is live from now on. Not to be changed any more."""
        ...

    def previous_tokens(self, count: int) -> Ints:
        """[tokens, count]: the ids before each token of the ubatch, oldest first; NULL_TOKEN where there
        are none. It takes no notice of where ubatches begin."""
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
    def rotated(self) -> tuple[str, ...]:
        """Names of parts whose rows are stored Hadamard-rotated (part of the fingerprint)."""
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

    def last_resumable(self, seq: SeqId, at_most: int) -> int:
        """The largest position of at most `at_most` at which the sequence can resume; 0 if no other."""
        ...

    def drops_rows(self) -> bool:
        """Whether a sequence may lose rows as it grows, so that it cannot be cut back to where it stands now:
        windows that have fewer cells than there are in all."""
        ...

    def mark(self, seq: SeqId) -> None:
        """Remember the point state where the sequence stands, so that it can resume here later. Kept within
        the byte budget: the checkpoint that is least missed goes first. Nothing without point state."""
        ...

    def free_cells(self) -> int:
        """Cells that a new token could take, in the fullest sub-cache."""
        ...

    def snapshot(self, seq: SeqId, since: int = 0) -> tuple[tuple[Rows, ...], tuple[Point, ...]]:
        """Rows of [since, length) and the point state, copied out; for window parts as far back
        (not before `since`) as memory has them. Raises EditRefused if positions are not 0…n-1."""
        ...

    def restore(
        self, seq: SeqId, tokens: tuple[int, ...], rows: Sequence[Run], points: tuple[Point, ...]
    ) -> None:
        """Fill the empty sequence `seq` with the rows of `tokens`; `rows` holds consecutive runs of each
        kind, whose parts are asked for once and one after the other, and copied straight into the cells. All
        or nothing: after an error the sequence is empty. Raises NoSlot (before anything is read), StateError
        if rows or point state that are needed are missing or misshapen, and what reading raises."""
        ...

    def replace(
        self, seq: SeqId, tokens: tuple[int, ...], rows: Sequence[Run], points: tuple[Point, ...]
    ) -> None:
        """As `restore`, in place of what the sequence has, whose cells can be taken for it. All or nothing:
        after an error it has that still. Raises as `restore`."""
        ...

    def tokens_at(self, seq: SeqId, start: int, stop: int) -> tuple[int, ...]:
        """Token ids of the cells at positions [start, stop), in order."""
        ...
