"""Which parts the cache of one model has: learned from a cache that a few tokens went through."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.errors import CacheRefused
from engine.hosted.laws import Layer, RowsLaw, StatesLaw, check_cache, halves_of
from engine.state import Layout, PartKind, PartSpec

#: A DynamicCache of transformers with the state of one sequence.
Cache = Any

#: dtypes as tensors have them, and as states name them
_DTYPES: Mapping[torch.dtype, str] = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
}


@dataclass(frozen=True, slots=True, eq=False)
class RowsPart:
    """Rows of one attribute of a layer. `shape` is one token's, as the tensor has it without the axes of
    sequences and tokens."""

    spec: PartSpec
    law: RowsLaw
    layer: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def of(self, cache: Cache) -> torch.Tensor:
        """The tensor as it is."""
        tensor: torch.Tensor = getattr(cache.layers[self.layer], self.law.attribute)
        return tensor

    def by_token(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view [tokens, *shape] of a tensor such as the layer has."""
        alone = tensor.squeeze(self.law.batch)
        return alone.movedim(self.law.tokens - (self.law.batch < self.law.tokens), 0)

    def empty(self, count: int) -> torch.Tensor:
        """A tensor such as the layer has, for `count` tokens, not filled."""
        tokens = self.law.tokens - (self.law.batch < self.law.tokens)
        shape = [*self.shape[:tokens], count, *self.shape[tokens:]]
        shape.insert(self.law.batch, 1)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def as_bytes(self, tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """uint8 [stop - start, row_nbytes], a copy of these rows of the tensor."""
        rows = self.by_token(tensor)[start:stop].clone(memory_format=torch.contiguous_format)
        return rows.reshape(len(rows), -1).view(torch.uint8)

    def put(self, tensor: torch.Tensor, start: int, stored: torch.Tensor) -> None:
        """Write rows, uint8 [n, row_nbytes], into the tensor from `start` on."""
        # A copy first: where bytes lie in a file may be no place for values.
        values = stored.clone().view(self.dtype).reshape(len(stored), *self.shape)
        self.by_token(tensor)[start : start + len(stored)].copy_(values)


@dataclass(frozen=True, slots=True, eq=False)
class StatePart:
    """One tensor of point state of a layer."""

    spec: PartSpec
    law: StatesLaw
    layer: int
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def of(self, cache: Cache) -> torch.Tensor:
        tensor: torch.Tensor = getattr(cache.layers[self.layer], self.law.attribute)[self.number]
        return tensor

    def as_bytes(self, cache: Cache) -> torch.Tensor:
        """uint8 [row_nbytes], a copy."""
        state = self.of(cache).clone(memory_format=torch.contiguous_format)
        return state.reshape(-1).view(torch.uint8)

    def tensor(self, stored: torch.Tensor) -> torch.Tensor:
        """A tensor such as the layer has, of uint8 [row_nbytes]."""
        state = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        state.view(-1).view(torch.uint8).copy_(stored)
        return state


@dataclass(frozen=True, slots=True, eq=False)
class Geometry:
    """`make` gives an empty cache. `window` counts the rows that window parts need to go on; 0 without any.
    Parts are in the order of the layout; the `hollow` ones have no values, so that no state has them."""

    make: Callable[[], Cache]
    tokens: tuple[RowsPart, ...]
    windows: tuple[RowsPart, ...]
    states: tuple[StatePart, ...]
    hollow: tuple[RowsPart, ...]
    window: int

    @property
    def layout(self) -> Layout:
        rows = (*self.tokens, *self.windows)
        return (*(part.spec for part in rows), *(state.spec for state in self.states))

    def rows_of(self, kind: PartKind) -> tuple[RowsPart, ...]:
        return self.windows if kind is PartKind.WINDOW else self.tokens

    def filled(self, length: int, rows: Sequence[torch.Tensor], states: Sequence[torch.Tensor]) -> Cache:
        """A cache after `length` tokens that keeps these tensors: those of `tokens` and `windows`, and those
        of `states`."""
        cache = self.make()
        tensors: defaultdict[int, dict[str, torch.Tensor]] = defaultdict(dict)
        for part, tensor in zip((*self.tokens, *self.windows), rows, strict=True):
            tensors[part.layer][part.law.name] = tensor
        for part in self.hollow:
            tensors[part.layer][part.law.name] = part.empty(self.held(part, length))
        for state, tensor in zip(self.states, states, strict=True):
            tensors[state.layer][f"{state.law.name} {state.number}"] = tensor
        for index, found in tensors.items():
            for half in halves_of(cache.layers[index], index):
                half.fill(cache.layers[index], found, length)
        return cache

    def held(self, part: RowsPart, length: int) -> int:
        """How many rows of a part a cache of `length` tokens has."""
        return min(length, self.window) if part.law.window else length

    def check(self, cache: Cache, length: int) -> None:
        """Raises CacheRefused unless `cache` has these parts, and of each as many rows as belong to `length`
        tokens."""
        check_cache(cache)
        there = {(index, law.name, number) for index, law, number, _ in _tensors(cache)}
        rows = (*self.tokens, *self.windows, *self.hollow)
        known = {(part.layer, part.law.name, 0) for part in rows}
        known |= {(part.layer, part.law.name, part.number) for part in self.states}
        if there != known:
            index, name, _ = min(there ^ known)
            raise CacheRefused(f"layer {index} of the cache has its {name} at some times, and at others not")
        for part in rows:
            held, wanted = part.of(cache).shape[part.law.tokens], self.held(part, length)
            if held != wanted:
                raise CacheRefused(
                    f"layer {part.layer} of the cache has {held} rows after {length} tokens, not {wanted}"
                )


def learn(make: Callable[[], Cache], cache: Cache) -> Geometry:
    """The geometry of the caches that `make` gives, from one that some tokens of one sequence went through.
    Raises CacheRefused, naming the layer, for what cannot be held."""
    check_cache(cache)
    rows: list[RowsPart] = []
    states: list[StatePart] = []
    windows: set[int] = set()
    for index, law, number, tensor in _tensors(cache):
        dtype = _DTYPES.get(tensor.dtype)
        if dtype is None:
            raise CacheRefused(f"layer {index} of the cache keeps {tensor.dtype}, which no state has")
        match law:
            case StatesLaw():
                _one(index, tensor.shape[0])
                name = f"{law.name}{number}.{index:02}"
                shape = tuple(tensor.shape)
                spec = PartSpec(name, PartKind.POINT, index, dtype, shape[1:] or (1,))
                states.append(StatePart(spec, law, index, number, shape, tensor.dtype, tensor.device))
            case RowsLaw():
                _one(index, tensor.shape[law.batch])
                window = None
                if law.window:
                    window = int(cache.layers[index].sliding_window) - 1
                    windows.add(window)
                    if window < 1:
                        raise CacheRefused(f"layer {index} of the cache has a window of one token")
                shape = tuple(n for axis, n in enumerate(tensor.shape) if axis not in (law.batch, law.tokens))
                kind = PartKind.TOKEN if window is None else PartKind.WINDOW
                spec = PartSpec(f"{law.name}.{index:02}", kind, index, dtype, shape, window=window)
                rows.append(RowsPart(spec, law, index, shape, tensor.dtype, tensor.device))
    if len(windows) > 1:
        sizes = ", ".join(str(window + 1) for window in sorted(windows))
        raise CacheRefused(f"the cache has windows of several sizes ({sizes}): rows are kept for one alone")
    if not rows and not states:
        raise CacheRefused("nothing of what the model reads is in its cache")
    solid = [part for part in rows if part.spec.num_values]
    return Geometry(
        make,
        tuple(sorted((part for part in solid if not part.law.window), key=_rank)),
        tuple(sorted((part for part in solid if part.law.window), key=_rank)),
        tuple(sorted(states, key=_rank)),
        tuple(part for part in rows if not part.spec.num_values),
        max(windows, default=0),
    )


def _tensors(cache: Cache) -> Iterator[tuple[int, RowsLaw | StatesLaw, int, torch.Tensor]]:
    """Every tensor that the layers keep: of which layer, by which law, and its number there."""
    for index, layer in enumerate(cache.layers):
        for half in halves_of(layer, index):
            for law in half.rows:
                tensor = getattr(layer, law.attribute)
                if tensor is not None:
                    yield index, law, 0, tensor
            for states in half.states:
                for number, tensor in _numbered(layer, states):
                    yield index, states, number, tensor


def _numbered(layer: Layer, law: StatesLaw) -> Iterable[tuple[int, torch.Tensor]]:
    found: Mapping[int, torch.Tensor | None] = getattr(layer, law.attribute)
    return ((number, tensor) for number, tensor in found.items() if tensor is not None)


def _one(index: int, count: int) -> None:
    if count != 1:
        raise CacheRefused(f"layer {index} of the cache has {count} sequences")


def _rank(part: RowsPart | StatePart) -> tuple[int, str]:
    return part.layer, part.spec.name


def fork(cache: Cache) -> Cache:
    """Another cache of the same tokens. Rows are shared, since they are replaced and never written to; states
    are written to, and copied: so that they lie in memory as those that were restored, which decides how they
    are computed with."""
    twin = copy.copy(cache)
    twin.layers = [_fork_layer(layer) for layer in cache.layers]
    return twin


def _fork_layer(layer: Layer) -> Layer:
    twin = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            copied = {
                key: one.clone(memory_format=torch.contiguous_format)
                if isinstance(one, torch.Tensor)
                else one
                for key, one in value.items()
            }
            setattr(twin, name, copied)
    return twin
