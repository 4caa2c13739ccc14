"""`SequenceState`: all that ever leaves or enters the engine, as frozen data.

Every memory, however odd, is made of four kinds of part (docs/architecture.md, "What a state is"):
token rows, block rows, window rows and point state. Who knows the four kinds can save anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType, Protocol

import torch

from engine.errors import ConfigError

SeqId = NewType("SeqId", int)

#: bytes of one block and values in it, for every row dtype. A plain dtype is a block of one value.
#: The quantized layouts are those of GGUF (q8_0: f16 scale + 32 int8; q5_0: + 4 bytes of high bits).
DTYPES: Mapping[str, tuple[int, int]] = {
    "f32": (4, 1),
    "f16": (2, 1),
    "bf16": (2, 1),
    "i64": (8, 1),
    "q8_0": (34, 32),
    "q5_0": (22, 32),
    "q4_0": (18, 32),
}


class PartKind(StrEnum):
    """The four laws a part can obey."""

    TOKEN = "token"  # one row per token, written once, never changed by later tokens
    BLOCK = "block"  # one row per closed block of `block` tokens, written once
    WINDOW = "window"  # token rows of which only the last `window` are needed to go on
    POINT = "point"  # true at exactly one position


class Provenance(StrEnum):
    """How rows came to be. Only `computed` rows may be shared by equal token ids."""

    COMPUTED = "computed"
    SHIFTED = "shifted"
    EDITED = "edited"
    REENCODED = "re-encoded"
    IMPORTED = "imported"


@dataclass(frozen=True, slots=True)
class PartSpec:
    """One named tensor group of a layer: what one row of it holds.

    `shape` is one row's logical shape in values, e.g. (kv heads, head size); the last axis is the one
    that quantized dtypes cut into blocks. `block` counts tokens per row (1 but for block rows);
    `window` is the number of trailing rows needed, for window rows alone.
    """

    name: str
    kind: PartKind
    layer: int
    dtype: str
    shape: tuple[int, ...]
    block: int = 1
    window: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"part {self.name}: unknown dtype {self.dtype!r}")
        if self.shape[-1] % DTYPES[self.dtype][1]:
            raise ConfigError(
                f"part {self.name}: a row of {self.shape[-1]} values cannot be stored as {self.dtype}"
            )
        if (self.window is None) == (self.kind is PartKind.WINDOW):
            raise ConfigError(f"part {self.name}: window rows, and only they, have a window")

    @property
    def num_values(self) -> int:
        count = 1
        for n in self.shape:
            count *= n
        return count

    @property
    def row_nbytes(self) -> int:
        nbytes, values = DTYPES[self.dtype]
        return self.num_values // values * nbytes

    def num_rows(self, start: int, stop: int) -> int:
        """Rows of this part that belong to tokens [start, stop)."""
        return stop // self.block - start // self.block


#: Every part of a memory, in a fixed order: by kind, then layer, then name.
Layout = tuple[PartSpec, ...]


def parts_of(layout: Layout, kind: PartKind) -> Layout:
    return tuple(spec for spec in layout if spec.kind is kind)


class Run(Protocol):
    """`Rows` that are perhaps not read yet. What they are of is known before."""

    @property
    def kind(self) -> PartKind: ...

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """As in `Rows`, and to be copied from at once: those of a run that is read only now are good until
        parts of another one are asked for. Asked again, they are read again. Raises what reading raises."""
        ...

    def kept(self) -> Rows:
        """The same for good."""
        ...


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive rows of every part of one kind, for tokens [start, stop). See `Run`, too.

    `parts[i]` belongs to the i-th spec of that kind in the layout: uint8 [num_rows, row_nbytes],
    contiguous, on the host or on the device.
    """

    kind: PartKind
    start: int
    stop: int
    parts: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.numel() for part in self.parts)

    def kept(self) -> Rows:
        return self


@dataclass(frozen=True, slots=True)
class Point:
    """Point state at one position: `parts[i]` is uint8 [row_nbytes] of the i-th point spec."""

    position: int
    parts: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """Rows [start, stop) share one provenance."""

    start: int
    stop: int
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class Pending:
    """A token that was sampled (and perhaps shown) but not fed yet."""

    token: int


@dataclass(frozen=True, slots=True)
class NextLogits:
    """Nothing was sampled yet: float32 [vocab] logits that follow the last fed token."""

    logits: torch.Tensor


#: What follows the fed tokens. `None` only for an empty sequence.
Edge = Pending | NextLogits | None


@dataclass(frozen=True, slots=True)
class Canary:
    """The largest logits after the last fed token, to recognise an engine that computes otherwise."""

    position: int
    ids: tuple[int, ...]
    logits: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SamplerParams:
    """How the next token is chosen.

    Draws are a function of (seed, position) and penalties of the token ids, so that the sampler has a
    state at every position and these values are all of it. temperature 0 is greedy.
    """

    temperature: float = 0.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_last_n: int = 64
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        checks = (
            ("temperature", 0 <= self.temperature < math.inf),
            ("top_k", self.top_k >= 0),
            ("top_p", 0 < self.top_p <= 1),
            ("min_p", 0 <= self.min_p <= 1),
            ("repeat_penalty", 0 < self.repeat_penalty < math.inf),
            ("presence_penalty", math.isfinite(self.presence_penalty)),
            ("frequency_penalty", math.isfinite(self.frequency_penalty)),
            ("logit_bias", all(bias < math.inf for _, bias in self.logit_bias)),  # -inf bans a token
            ("penalty_last_n", self.penalty_last_n >= 0),
            ("seed", 0 <= self.seed < 2**64),
        )
        for name, good in checks:
            if not good:
                raise ConfigError(f"sampler: {name} = {getattr(self, name)} is out of range")


Value = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a state was made with.

    `meaning` decides what rows mean: weights digest, architecture, geometry, RoPE, cache dtypes,
    rotation, tokenizer. Another value is refused. `making` decides only their last bits: builds,
    device kind, threads, compute dtype. Another value restores as `compatible`, after a canary.
    """

    meaning: Mapping[str, Value] = field(default_factory=dict)
    making: Mapping[str, Value] = field(default_factory=dict)

    def differing(self, other: Fingerprint) -> Iterator[tuple[str, Value, Value]]:
        """(field, mine, theirs) for every field of meaning that differs."""
        for name in sorted({*self.meaning, *other.meaning}):
            mine, theirs = self.meaning.get(name), other.meaning.get(name)
            if mine != theirs:
                yield name, mine, theirs


@dataclass(frozen=True, slots=True)
class DraftState:
    """What a drafter keeps of a sequence, beside the state of the model that it drafts for.

    `layout`, `rows` and `points` are as in a `SequenceState`, of the drafter's own memory, and `fingerprint`
    says what made them. Rows belong to the first `length` of the sequence's tokens; point state is true
    there. What belongs to a token may depend on up to `ahead` that follow it.
    """

    fingerprint: Fingerprint
    layout: Layout
    length: int
    rows: tuple[Rows, ...]
    points: tuple[Point, ...]
    ahead: int = 0

    @property
    def reach(self) -> int:
        """Of how many of the sequence's tokens it is made: with others behind them it is as true."""
        return self.length + self.ahead


@dataclass(frozen=True, slots=True)
class SequenceState:
    """One sequence, complete: feed the edge, and it goes on as if it had never stopped.

    `tokens` are the fed ids; row i of every token part belongs to tokens[i]. `rows` holds, for each
    kind, one or more consecutive runs in order (a restored state has a run per chunk). A snapshot taken
    `since` a position has token and block rows from there on alone; window rows start at the first that
    memory still has (or at `since`). `points` are checkpoints, in order of position. `draft` is the
    drafter's part, where one keeps something.
    """

    layout: Layout
    fingerprint: Fingerprint
    tokens: tuple[int, ...]
    rows: tuple[Rows, ...]
    points: tuple[Point, ...]
    spans: tuple[Span, ...]
    edge: Edge
    sampler: SamplerParams
    canary: Canary | None = None
    draft: DraftState | None = None

    @property
    def length(self) -> int:
        return len(self.tokens)

    def rows_of(self, kind: PartKind) -> tuple[Rows, ...]:
        """The runs of one kind, in order; empty when there are none."""
        return tuple(rows for rows in self.rows if rows.kind is kind)


def least_missed(positions: Sequence[int]) -> int:
    """Which of some checkpoints, at rising `positions`, costs least to lose: its index.

    Who goes back to a place behind a checkpoint that is gone reads again from the one before it. That is
    the distance between the two, for as many places as there are up to the next. The last two go last: from
    the last one conversations go on, and to the one before goes who says its last message otherwise.
    """
    if len(positions) <= 2:
        return 0
    before = (0, *positions[:-3])
    costs = [
        (at - last) * (following - at)
        for last, at, following in zip(before, positions[:-2], positions[1:-1], strict=True)
    ]
    return costs.index(min(costs))
