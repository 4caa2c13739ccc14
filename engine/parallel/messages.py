"""What rank 0 tells the others: few words, each with numbers and bytes alone, in msgpack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import msgpack
import numpy as np

from engine.batch import Batch


@dataclass(frozen=True, slots=True)
class Load:
    """Read your share of the model at `source`, for an engine of `config`."""

    source: str
    config: Mapping[str, str | int | bool | None]


@dataclass(frozen=True, slots=True)
class Plan:
    """A batch was planned: int64 arrays as bytes. After which rows logits are wanted is rank 0's business."""

    tokens: bytes
    positions: bytes
    seqs: bytes
    grid: bytes | None

    @classmethod
    def of(cls, batch: Batch) -> Plan:
        grid = None if batch.grid is None else batch.grid.tobytes()
        return cls(batch.tokens.tobytes(), batch.positions.tobytes(), batch.seqs.tobytes(), grid)

    @property
    def batch(self) -> Batch:
        tokens, positions, seqs = (
            np.frombuffer(data, np.int64) for data in (self.tokens, self.positions, self.seqs)
        )
        grid = None if self.grid is None else np.frombuffer(self.grid, np.int64).reshape(-1, 2)
        return Batch(tokens, positions, seqs, np.zeros(len(tokens), np.bool_), grid)


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply ubatch `index` of the plan, and compute your part of it."""

    index: int


@dataclass(frozen=True, slots=True)
class Commit:
    """The plan is committed."""


@dataclass(frozen=True, slots=True)
class Rollback:
    """The plan is rolled back."""


@dataclass(frozen=True, slots=True)
class Edit:
    """A verb of the memory was done, and did not fail."""

    verb: str
    arguments: Sequence[int | None]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Give rank 0 your heads of the rows of `seq` from `since` on."""

    seq: int
    since: int


@dataclass(frozen=True, slots=True)
class Restore:
    """Take from rank 0 your part of a state for `verb`: `runs` of (kind, start, stop), and point state at
    `points`."""

    verb: str
    seq: int
    tokens: bytes  # int64
    runs: Sequence[tuple[str, int, int]]
    points: Sequence[int]


@dataclass(frozen=True, slots=True)
class End:
    """There is nothing more to do."""


Message = Load | Plan | Apply | Commit | Rollback | Edit | Snapshot | Restore | End

_BY_NAME: Mapping[str, type[Message]] = {
    kind.__name__: kind for kind in (Load, Plan, Apply, Commit, Rollback, Edit, Snapshot, Restore, End)
}


def encode(messages: Sequence[Message]) -> bytes:
    packed: bytes = msgpack.packb([[type(one).__name__, *astuple(one)] for one in messages])
    return packed


def decode(data: bytes) -> list[Message]:
    """What `encode` was given."""
    said: list[list[Any]] = msgpack.unpackb(data)
    return [_BY_NAME[name](*values) for name, *values in said]
