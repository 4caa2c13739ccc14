"""One sequence as a foreign file holds it: rows in its own value order and dtype, and what it says of them.

Readers make it of bytes, writers make bytes of it; `convert.py` turns it into our rows and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import torch

from serialization.foreign.geometry import CacheRole

Ints = npt.NDArray[np.int64]


class Rotation(StrEnum):
    """Whether quantized rows were Hadamard-rotated before they were stored."""

    NONE = "none"  # known not to be, or not quantized
    ROTATED = "rotated"
    UNKNOWN = "unknown"  # nothing in the file can tell: the caller says it, or the proof finds it


class ValueOrder(StrEnum):
    """In which order the values of a row are."""

    #: As llama.cpp has them: RoPE's pairs as the geometry's `pairing` says, a convolution's inputs a channel
    #: at a time (oldest first), states as its operators keep them.
    GGML = "ggml"
    #: As ours are: RoPE turns value i of a head with i + n/2, a convolution's inputs are a token at a time
    #: (oldest first), states as a Hugging Face checkpoint's own code has them. The reader saw to it.
    OURS = "ours"


class Tensor(StrEnum):
    """What of a layer a tensor is."""

    KEYS = "k"
    VALUES = "v"
    CONV = "r"
    STATE = "s"


@dataclass(frozen=True, slots=True)
class ForeignRows:
    """One tensor of one layer: uint8 [cells, row_nbytes], contiguous, one row a cell (transposed values are
    put upright by the reader). `dtype` is a name of `engine.state.DTYPES`."""

    layer: int
    tensor: Tensor
    dtype: str
    data: torch.Tensor


@dataclass(frozen=True, slots=True)
class ForeignCells:
    """Cells of one cache and their rows, in the file's order, which need not be that of positions.

    `positions` int64 [cells]; `extension` int32 [cells, words] where cells carry one. `transposed`: values
    were stored a channel at a time.
    """

    role: CacheRole
    positions: Ints
    rows: tuple[ForeignRows, ...]
    extension: npt.NDArray[np.int32] | None = None
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class ForeignPoint:
    """Recurrent state after the token at `position`: one cell, a `ForeignRows` of one row for each tensor."""

    position: int
    rows: tuple[ForeignRows, ...]


@dataclass(frozen=True, slots=True)
class ForeignState:
    """`source` says for people what it was read from, `layout` by which name of the version table.

    `tokens` are the ids that the file lists, None where it has none. They are the caller's word: nothing
    in the file ties them to cells. `caches` and `point` are as the geometry has them, one for one, also
    where a file keeps full and window layers together (then the window has all of its rows). `notes` say
    what was found and not taken (outputs of an old session file, a medium's bytes, ...). `details` is what
    a writer needs to make the same bytes again (stream count, cell order, ...), and nobody else.
    """

    source: str
    layout: str
    tokens: tuple[int, ...] | None
    caches: tuple[ForeignCells, ...]
    point: ForeignPoint | None = None
    rotation: Rotation = Rotation.UNKNOWN
    order: ValueOrder = ValueOrder.GGML
    notes: tuple[str, ...] = ()
    details: Mapping[str, object] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens that the rows are of: one more than the last position."""
        ends = [int(cells.positions.max()) + 1 for cells in self.caches if len(cells.positions)]
        if self.point is not None:
            ends.append(self.point.position + 1)
        return max(ends, default=0)
