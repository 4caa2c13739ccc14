"""What prompt caches of Python libraries hold, layer by layer.

mlx-lm and transformers keep tensors of [1, heads, tokens, size] where llama.cpp keeps rows of cells. Their
readers say which of those tensors are whose and of which positions; `assembly.py` makes rows of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.errors import UnknownFeature
from serialization.foreign.geometry import Pairing
from serialization.foreign.tensor_file import Array, quoted

#: safetensors' names of the dtypes that rows come in, and ours.
FLOATS: Mapping[str, str] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


#: Architectures, by letters and digits alone, whose rows both libraries store multiplied by numbers of the
#: configuration, where ours are not.
_SCALED = frozenset({"falconh1", "mimov2flash"})


def plain_name(architecture: str) -> str:
    """An architecture's name by letters and digits alone: systems write it in different ways.

    Raises UnknownFeature for one whose rows are stored multiplied by what no file says.
    """
    name = "".join(char for char in architecture.lower() if char.isalnum())
    if name in _SCALED:
        raise UnknownFeature(
            f"rows of {quoted(architecture)} are stored multiplied by what the file does not say: its token"
            " ids can be read anew"
        )
    return name


class Slots(Protocol):
    """Keys or values of a cache, [heads, slots, size], that are perhaps made only when they are asked for."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def rows(self, start: int, stop: int) -> Array:
        """[stop - start, heads, size] of these slots, to be copied from at once."""
        ...


@dataclass(frozen=True, slots=True)
class Floats:
    """Values of a dtype of `engine.state.DTYPES` that is a plain one; bfloat16 as its bits."""

    dtype: str
    values: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def rows(self, start: int, stop: int) -> Array:
        return self.values[:, start:stop].transpose(1, 0, 2)


@dataclass(frozen=True, slots=True)
class Joined:
    """Heads of which the first values are those of `first`, and the others of `second`."""

    first: Slots
    second: Slots

    @property
    def dtype(self) -> str:
        return self.first.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.first.shape[:2], self.first.shape[2] + self.second.shape[2])

    def rows(self, start: int, stop: int) -> Array:
        return np.concatenate([self.first.rows(start, stop), self.second.rows(start, stop)], axis=-1)


@dataclass(frozen=True, slots=True)
class Run:
    """`count` slots from `slot` on hold the rows of as many positions from `position` on."""

    slot: int
    position: int
    count: int

    @property
    def stop(self) -> int:
        return self.position + self.count


@dataclass(frozen=True, slots=True)
class HeldRows:
    """Rows of one cache of one layer: keys and values [heads, slots, size], values None where there are none.
    `runs` say which slots hold which positions, rising by position; a slot of none holds nothing."""

    keys: Slots
    values: Slots | None
    runs: tuple[Run, ...]

    @property
    def length(self) -> int:
        """Tokens that the rows are of: one more than the last position."""
        return max((run.stop for run in self.runs if run.count), default=0)


@dataclass(frozen=True, slots=True)
class HeldPoint:
    """Recurrent state of one layer: the last inputs of its convolutions, each [inputs, channels], the oldest
    first; and the state, [...] as a checkpoint's own code has it, None where there is none."""

    convs: tuple[Floats, ...]
    state: Floats | None


@dataclass(frozen=True, slots=True)
class HeldLayer:
    """All that one layer holds; of a layer with two caches of rows the main one is first."""

    rows: tuple[HeldRows, ...] = ()
    point: HeldPoint | None = None


@dataclass(frozen=True, slots=True)
class Pairings:
    """Which values RoPE turned together in keys, and in the keys of an indexer."""

    keys: Pairing = Pairing.HALVES
    index: Pairing = Pairing.HALVES


@dataclass(frozen=True, slots=True)
class Held:
    """A whole prompt cache, by layer of the model. `tokens` are None where nobody has them, and `length`, how
    many tokens it has seen, where the file does not say it."""

    source: str
    layout: str
    layers: Mapping[int, HeldLayer]
    tokens: tuple[int, ...] | None
    pairings: Pairings
    notes: tuple[str, ...] = ()
    length: int | None = None
