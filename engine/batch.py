"""Batches: the tokens of one decode call, of any number of sequences, and the ubatches they are cut into."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.errors import ConfigError
from engine.state import SeqId

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

#: Rows of a pass of fixed shape (see `engine.placing`). A lone token costs as much as all of them: more would
#: slow decoding down (16 by a quarter), fewer reading.
NUM_PLACES = 8


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
    """What the model computes in one pass. `rows[i]` is the batch row that row i came from. `places` are the
    rows of a pass of fixed shape that they are computed in (see `engine.placing`), or None."""

    batch: Batch
    rows: Ints
    segments: tuple[Segment, ...]
    places: Ints | None = None

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


def split_apart(batch: Batch, cuts_of: Callable[[SeqId, int], Iterable[int]]) -> tuple[Ubatch, ...]:
    """Ubatches of one sequence each, one sequence after the other: `cuts_of` a sequence and the number of its
    rows says how many go into each."""
    cuts = []
    for seq, count in counts_of(batch):
        rows, at = np.flatnonzero(batch.seqs == seq), 0
        for length in cuts_of(seq, count):
            cuts.append(rows[at : at + length])
            at += length
    return tuple(_ubatch(batch, rows) for rows in cuts)


def split_placed(batch: Batch, max_ubatch: int) -> tuple[Ubatch, ...]:
    """Ubatches in which a token at position p has the place p modulo NUM_PLACES for itself, and is a segment
    of its own. Each is in the first one where its place is free, and none of its sequence's is further on."""
    places = (batch.positions % NUM_PLACES).tolist()
    cuts: list[dict[int, int]] = []
    reached: dict[int, int] = {}
    for row, (place, seq) in enumerate(zip(places, batch.seqs.tolist(), strict=True)):
        index = reached.get(seq, 0)
        while index < len(cuts) and (place in cuts[index] or len(cuts[index]) == max_ubatch):
            index += 1
        if index == len(cuts):
            cuts.append({})
        cuts[index][place] = row
        reached[seq] = index
    return tuple(_placed(batch, cut) for cut in cuts)


def _placed(batch: Batch, cut: Mapping[int, int]) -> Ubatch:
    """The rows of `cut`, by their places."""
    rows = np.fromiter(cut.values(), np.int64)
    segments = (Segment(SeqId(seq), at, at + 1) for at, seq in enumerate(batch.seqs[rows].tolist()))
    return Ubatch(batch, rows, tuple(segments), np.fromiter(cut, np.int64))


def split_equal(batch: Batch, max_ubatch: int, n_keep_tail: int = 0) -> tuple[Ubatch, ...]:
    """Ubatches in which every sequence has equally many rows, sequence after sequence.

    Members that compute sequences side by side (recurrent ones) need this. Sequences go on together until
    the first of them ends; more sequences than fit take turns. The last `n_keep_tail` rows of a sequence
    (all of them, if it has fewer) are in one ubatch: a cut that would divide them is made before them, or
    the sequence waits. Raises ConfigError unless `n_keep_tail` rows fit into a ubatch.
    """
    if n_keep_tail > max_ubatch:
        raise ConfigError(f"keep_tail = {n_keep_tail}: an ubatch has {max_ubatch} tokens at most")
    rest = {seq: np.flatnonzero(batch.seqs == seq) for seq in _in_order(batch.seqs)}
    ubatches = []
    while rest:
        together, count = _lockstep({seq: len(rows) for seq, rows in rest.items()}, max_ubatch, n_keep_tail)
        ubatches.append(_ubatch(batch, np.concatenate([rest[seq][:count] for seq in together])))
        rest = {seq: rows[count:] if seq in together else rows for seq, rows in rest.items()}
        rest = {seq: rows for seq, rows in rest.items() if len(rows)}
    return tuple(ubatches)


def _lockstep(left: Mapping[int, int], max_ubatch: int, n_keep_tail: int) -> tuple[list[int], int]:
    """Which sequences go on together, and by how many rows, given how many each has `left`.

    As many sequences as fit, and as far as all of them can go; those whose tail a step of that length
    would divide are left out. Where it would divide everyone's, the first goes on alone.
    """
    together = list(left)[:max_ubatch]
    count = min(max_ubatch // len(together), *(left[seq] for seq in together))
    whole = [seq for seq in together if left[seq] == count or left[seq] - count >= n_keep_tail]
    if whole:
        return whole, count
    first = together[0]
    if left[first] <= max_ubatch:
        return [first], left[first]
    return [first], min(max_ubatch, left[first] - n_keep_tail)


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
