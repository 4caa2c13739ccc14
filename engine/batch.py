"""Batches: the tokens of one decode call, of any number of sequences, and the ubatches they are cut into."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.state import SeqId

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens to feed: row i puts `tokens[i]` at `positions[i]` of sequence `seqs[i]`.

    `outputs[i]` asks for logits after row i. `grid` holds 2-D positions [n, 2] (column, row) for
    media, or None. Within a sequence, positions go on from its last one without a hole.
    """

    tokens: Ints
    positions: Ints
    seqs: Ints
    outputs: Bools
    grid: Ints | None = None

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [start, stop) of a ubatch: consecutive tokens of one sequence."""

    seq: SeqId
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Ubatch:
    """What the model computes in one pass. `rows[i]` is the batch row that row i came from."""

    batch: Batch
    rows: Ints
    segments: tuple[Segment, ...]

    def __len__(self) -> int:
        return len(self.rows)
