"""Point state: what is true at exactly one position of a sequence, and the checkpoints kept of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.cache.memory import PointSpec
from engine.state import SeqId, least_missed

#: The point state of one sequence at one position: the bytes of every part, never changed.
Frozen = tuple[torch.Tensor, ...]


class PointBuffer:
    """The live state of one part, float32 [*shape] for every sequence.

    A tensor that is kept is never written to: it is replaced. So reading copies nothing, and what a plan
    undoes, what a fork shares and what a checkpoint holds can be the same tensor.
    """

    def __init__(self, spec: PointSpec, num_seqs: int, device: torch.device) -> None:
        self.shape = spec.shape
        self._zeros = torch.zeros(spec.shape, dtype=torch.float32, device=device)
        self._data = [self._zeros] * num_seqs

    def read(self, seqs: Sequence[SeqId]) -> torch.Tensor:
        """The state of `seqs`, [seqs, *shape]; not to be changed."""
        if len(seqs) == 1:
            return self._data[seqs[0]][None]
        return torch.stack([self._data[seq] for seq in seqs])

    def write(self, seqs: Sequence[SeqId], values: torch.Tensor) -> None:
        """Keep `values` [seqs, *shape], which are not to be changed any more."""
        for seq, value in zip(seqs, values.to(self._zeros), strict=True):
            self._data[seq] = _own(value.view(self.shape))

    def clear(self, seq: SeqId) -> None:
        """As before the first token."""
        self._data[seq] = self._zeros

    def read_bytes(self, seq: SeqId) -> torch.Tensor:
        """uint8 [row_nbytes]; not to be changed."""
        return self._data[seq].view(-1).view(torch.uint8)

    def write_bytes(self, seq: SeqId, stored: torch.Tensor) -> None:
        """Put bytes back that `read_bytes` gave, here or elsewhere."""
        # Where bytes lie in a file is not where float32 values may, or where products of them would have the
        # same last bits.
        row = torch.empty_like(self._zeros)
        row.view(-1).view(torch.uint8).copy_(stored)
        self._data[seq] = row


def _own(row: torch.Tensor) -> torch.Tensor:
    """`row` with nothing beside it in memory, so that it keeps nothing else alive."""
    alone = row.is_contiguous() and row.untyped_storage().nbytes() == row.nbytes
    return row if alone else row.clone(memory_format=torch.contiguous_format)


class Checkpoints:
    """Frozen point states by sequence and position, within a budget of bytes; forks share them."""

    def __init__(self, num_seqs: int, budget: int) -> None:
        self._by_seq: list[dict[int, Frozen]] = [{} for _ in range(num_seqs)]
        self._budget = budget

    def positions(self, seq: SeqId) -> tuple[int, ...]:
        """Rising."""
        return tuple(sorted(self._by_seq[seq]))

    def at(self, seq: SeqId, position: int) -> Frozen | None:
        return self._by_seq[seq].get(position)

    def add(self, seq: SeqId, position: int, frozen: Frozen) -> None:
        """Keep `frozen`, the last of its sequence, and let others go until all fit: of the sequence that has
        most, the one that is least missed. Alone it goes too where it does not fit."""
        self._by_seq[seq][position] = frozen
        while self.nbytes() > self._budget:
            self._forget(self._victim(frozen))

    def _victim(self, new: Frozen) -> Frozen:
        others = [kept for kept in self._by_seq if any(one is not new for one in kept.values())]
        if not others:
            return new
        fullest = max(others, key=len)
        positions = sorted(fullest)
        return fullest[positions[least_missed(positions)]]

    def cut(self, seq: SeqId, length: int) -> None:
        """Forget those beyond `length`."""
        self._by_seq[seq] = {at: kept for at, kept in self._by_seq[seq].items() if at <= length}

    def copy(self, source: SeqId, target: SeqId, stop: int) -> None:
        self._by_seq[target] = {at: kept for at, kept in self._by_seq[source].items() if at <= stop}

    def nbytes(self) -> int:
        """Bytes kept, those that sequences share counted once."""
        kept = {id(frozen): frozen for by_position in self._by_seq for frozen in by_position.values()}
        return sum(part.numel() for frozen in kept.values() for part in frozen)

    def _forget(self, victim: Frozen) -> None:
        for seq, by_position in enumerate(self._by_seq):
            self._by_seq[seq] = {at: kept for at, kept in by_position.items() if kept is not victim}
