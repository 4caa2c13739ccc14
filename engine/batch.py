"""Batches: the tokens of one decode call, of any number of sequences, and the ubatches they are cut into."""

from __future__ import annotations

import itertools
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

    @property
    def tokens(self) -> Ints:
        return self.batch.tokens[self.rows]

    @property
    def positions(self) -> Ints:
        return self.batch.positions[self.rows]

    @property
    def outputs(self) -> Bools:
        return self.batch.outputs[self.rows]


def split_simple(batch: Batch, max_ubatch: int) -> tuple[Ubatch, ...]:
    """Cuts of up to `max_ubatch` rows in the order of the batch."""
    cuts = [np.arange(at, min(at + max_ubatch, len(batch))) for at in range(0, len(batch), max_ubatch)]
    return tuple(_ubatch(batch, rows) for rows in cuts)


def split_equal(batch: Batch, max_ubatch: int) -> tuple[Ubatch, ...]:
    """Ubatches in which every sequence has equally many rows, sequence after sequence.

    Members that compute sequences side by side (recurrent ones) need this. Sequences go on together until
    the first of them ends; more sequences than fit take turns.
    """
    rest = {seq: np.flatnonzero(batch.seqs == seq) for seq in _in_order(batch.seqs)}
    ubatches = []
    while rest:
        together = list(rest)[:max_ubatch]
        count = min(max_ubatch // len(together), *(len(rest[seq]) for seq in together))
        ubatches.append(_ubatch(batch, np.concatenate([rest[seq][:count] for seq in together])))
        rest = {seq: rows[count:] if seq in together else rows for seq, rows in rest.items()}
        rest = {seq: rows for seq, rows in rest.items() if len(rows)}
    return tuple(ubatches)


def counts_of(batch: Batch) -> list[tuple[SeqId, int]]:
    """(sequence, number of its rows) in order of first appearance."""
    return [(SeqId(seq), int((batch.seqs == seq).sum())) for seq in _in_order(batch.seqs)]


def _in_order(seqs: Ints) -> list[int]:
    values, first = np.unique(seqs, return_index=True)
    return [int(seq) for seq in values[np.argsort(first)]]


def _ubatch(batch: Batch, rows: Ints) -> Ubatch:
    seqs = batch.seqs[rows]
    edges = [0, *(int(at) + 1 for at in np.flatnonzero(np.diff(seqs))), len(rows)]
    segments = (Segment(SeqId(int(seqs[a])), a, b) for a, b in itertools.pairwise(edges))
    return Ubatch(batch, rows, tuple(segments))
