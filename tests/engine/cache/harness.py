"""Memories with rows that can be recognised, and what attention over them must give.

The key of a token is a row drawn from its id, turned to its position; its value is another such row. So
the content of every cell can be told from (token, position) alone, and a row out of place is seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch

from engine.batch import Batch, Ubatch
from engine.cache.cells import CellTable
from engine.cache.memory import (
    KEYS,
    VALUES,
    Memory,
    MemoryNeeds,
    MemorySpec,
    Plan,
    View,
    WindowSpec,
    keys_and_values,
)
from engine.cache.parts_memory import PartsMemory
from engine.cache.rows import RowBuffer, Slot
from engine.errors import Corrupt
from engine.rope import Rotary
from engine.state import PartKind, Rows, SeqId

CPU = torch.device("cpu")
A, B, C = SeqId(0), SeqId(1), SeqId(2)


@dataclass(frozen=True, slots=True)
class Layer:
    """What a test says of one layer."""

    layer: int
    num_kv_heads: int
    head_size_k: int
    head_size_v: int
    rotary: Rotary | None
    window: WindowSpec | None


def layers_of(memory_spec: MemorySpec) -> list[Layer]:
    keys_of = {part.layer: part for part in memory_spec.needs.parts if part.name == KEYS}
    values_of = {part.layer: part for part in memory_spec.needs.parts if part.name == VALUES}
    return [
        Layer(i, k.heads, k.size, values_of[i].size, k.turned and k.turned.rotary, k.window)  # type: ignore[union-attr]
        for i, k in sorted(keys_of.items())
    ]


def rotary(n_rot: int, magnitude: float = 1.0) -> Rotary:
    return Rotary(1 / 100 ** (torch.arange(0, n_rot, 2).float() / n_rot), magnitude)


def spec(
    *windows: WindowSpec | None,
    heads: int = 2,
    size: int = 8,
    size_v: int | None = None,
    n_rot: int | None = None,
    dtype: torch.dtype = torch.float32,
    types: tuple[str, str] = ("f32", "f32"),
    num_cells: int = 96,
    num_seqs: int = 3,
    max_batch: int = 32,
    max_ubatch: int = 32,
    full_windows: bool = False,
    magnitude: float = 1.0,
) -> MemorySpec:
    """One layer for each of `windows` (a single full layer if none are given)."""
    turned = rotary(size if n_rot is None else n_rot, magnitude)
    parts = [
        part
        for i, window in enumerate(windows or (None,))
        for part in keys_and_values(i, heads, size, size if size_v is None else size_v, turned, window)
    ]
    needs = MemoryNeeds("iswa" if any(windows) else "kv", tuple(parts))
    return MemorySpec(
        needs, num_cells, num_seqs, max_batch, max_ubatch, *types, dtype, CPU, full_windows=full_windows
    )


@cache
def raw(kind: str, token: int, layer: int, heads: int, size: int) -> torch.Tensor:
    """float32 [heads, size] that no other (kind, token, layer) has."""
    seed = hash((kind == "v", token, layer)) & 0x7FFFFFFF
    return torch.randn((heads, size), generator=torch.Generator().manual_seed(seed))


def raws(kind: str, tokens: Sequence[int], layer: Layer) -> torch.Tensor:
    """float32 [tokens, heads, size]."""
    size = layer.head_size_v if kind == "v" else layer.head_size_k
    if not len(tokens):
        return torch.zeros((0, layer.num_kv_heads, size))
    return torch.stack([raw(kind, int(token), layer.layer, layer.num_kv_heads, size) for token in tokens])


def keys(tokens: Sequence[int], positions: Sequence[int], layer: Layer) -> torch.Tensor:
    """What the keys of `tokens` must be at `positions`, float32."""
    assert layer.rotary is not None
    return layer.rotary.rotate(raws("k", tokens, layer), torch.tensor(list(positions), dtype=torch.int64))


def values(tokens: Sequence[int], layer: Layer) -> torch.Tensor:
    return raws("v", tokens, layer)


def queries(tokens: Sequence[int], layer: Layer, heads: int) -> torch.Tensor:
    """float32 [tokens, heads, size of k]; not turned, since nothing here depends on it."""
    rows = [raw("q", 10_000 + int(token), layer.layer, heads, layer.head_size_k) for token in tokens]
    return torch.stack(rows)


def batch_of(*parts: tuple[SeqId, int, Sequence[int]]) -> Batch:
    """Tokens of each (sequence, first position, tokens), one after the other."""
    tokens = np.concatenate([np.asarray(ids, np.int64) for _, _, ids in parts])
    positions = np.concatenate([np.arange(first, first + len(ids)) for _, first, ids in parts])
    seqs = np.concatenate([np.full(len(ids), seq, np.int64) for seq, _, ids in parts])
    return Batch(tokens, positions, seqs, np.ones(len(tokens), np.bool_))


def interleaved(batch: Batch, seed: int) -> Batch:
    """The same tokens, those of different sequences mixed."""
    seqs = np.random.default_rng(seed).permutation(batch.seqs)
    rows = np.empty(len(batch), np.int64)
    for seq in np.unique(seqs):
        rows[seqs == seq] = np.flatnonzero(batch.seqs == seq)
    return Batch(batch.tokens[rows], batch.positions[rows], batch.seqs[rows], batch.outputs[rows])


def run_layers(
    memory_spec: MemorySpec, ubatch: Ubatch, view: View, group: int = 2, softcap: float | None = None
) -> list[torch.Tensor]:
    """What each layer attends to, for a ubatch whose rows are the recognisable ones."""
    out = []
    tokens = ubatch.tokens.tolist()
    for layer in layers_of(memory_spec):
        q = queries(tokens, layer, group * layer.num_kv_heads).to(memory_spec.dtype)
        k = keys(tokens, ubatch.positions.tolist(), layer).to(memory_spec.dtype)
        v = values(tokens, layer).to(memory_spec.dtype)
        out.append(view.attend(layer.layer, q, k, v, 0.5, softcap))
    return out


def feed_plan(
    memory_spec: MemorySpec, plan: Plan, group: int = 2, softcap: float | None = None
) -> list[list[torch.Tensor]]:
    """Run every ubatch of a plan; outputs by ubatch and layer. The plan is left open."""
    return [
        run_layers(memory_spec, ubatch, plan.apply(index), group, softcap)
        for index, ubatch in enumerate(plan.ubatches)
    ]


def feed(
    memory_spec: MemorySpec,
    memory: Memory,
    *parts: tuple[SeqId, Sequence[int]],
    group: int = 2,
    softcap: float | None = None,
) -> list[list[torch.Tensor]]:
    """Append tokens to sequences, and commit."""
    firsts = [(seq, memory.pos_max(seq), tokens) for seq, tokens in parts]
    batch = batch_of(*((seq, 0 if last is None else last + 1, tokens) for seq, last, tokens in firsts))
    plan = memory.plan(batch)
    out = feed_plan(memory_spec, plan, group, softcap)
    plan.commit()
    return out


def dense(
    q: torch.Tensor,
    at: Sequence[int],
    tokens: Sequence[int],
    positions: Sequence[int],
    layer: Layer,
    softcap: float | None = None,
) -> torch.Tensor:
    """The attention of queries `q` at positions `at` over tokens at positions, in float64, by definition."""
    k, v = keys(tokens, positions, layer).double(), values(tokens, layer).double()
    group = q.shape[1] // layer.num_kv_heads
    out = torch.zeros((q.shape[0], q.shape[1], layer.head_size_v), dtype=torch.float64)
    held = torch.tensor(list(positions))
    for i, position in enumerate(at):
        visible = held <= position
        if layer.window is not None:
            size = layer.window.size
            visible &= held >= (position // size * size if layer.window.chunked else position - size + 1)
        for head in range(q.shape[1]):
            scores = k[visible, head // group] @ q[i, head].double() * 0.5
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            out[i, head] = scores.softmax(0) @ v[visible, head // group]
    return out


def masked(memory_spec: MemorySpec) -> PartsMemory:
    """A memory whose windows, if any, are masks over cells that keep everything."""
    return PartsMemory(memory_spec, CellTable(memory_spec.num_cells, memory_spec.num_seqs), None)


# -- looking inside: tests may ----------------------------------------------------------------------


def buffers(memory: PartsMemory, layer: int) -> tuple[RowBuffer, RowBuffer]:
    rows = memory._parts.rows
    return rows[KEYS, layer].buffer, rows[VALUES, layer].buffer


def windowed_of(memory: PartsMemory) -> CellTable:
    table = memory._tables.windowed
    assert table is not None
    return table


def held_rows(memory: PartsMemory, layer: int, seq: SeqId) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
    """(positions, keys, values) that a sequence holds in a layer, un-rotated float32, in order."""
    table = memory._parts.rows[KEYS, layer].table
    keys_buffer, values_buffer = buffers(memory, layer)
    slot = Slot.of(table.cells_of(seq), CPU)
    return table.positions_of(seq), keys_buffer.read_plain(slot), values_buffer.read_plain(slot)


def visible(memory: PartsMemory, num_seqs: int = 3) -> list[object]:
    """All that can be seen of a memory: what must be equal where nothing changed."""
    out: list[object] = []
    for seq in map(SeqId, range(num_seqs)):
        out.append((memory.pos_min(seq), memory.pos_max(seq), memory.tokens_at(seq, 0, 10**6)))
        for layer in sorted({layer for _, layer in memory._parts.rows}):
            positions, k, v = held_rows(memory, layer, seq)
            out.append((positions.tolist(), k.tolist(), v.tolist()))
    return [*out, memory.free_cells()]


def kinds_of(memory: PartsMemory) -> set[PartKind]:
    return {part.kind for part in memory.layout}


def pieces(run: Rows, at: tuple[int, ...]) -> list[Rows]:
    """`run` cut at some positions."""
    edges = [run.start, *(cut for cut in at if run.start < cut < run.stop), run.stop]
    return [
        Rows(run.kind, a, b, tuple(part[a - run.start : b - run.start] for part in run.parts))
        for a, b in itertools.pairwise(edges)
    ]


class Lent:
    """See `engine.state.Run`: its rows are spoilt as soon as those of another run are asked for."""

    _last: tuple[torch.Tensor, ...] = ()

    def __init__(self, run: Rows) -> None:
        self.kind, self.start, self.stop = run.kind, run.start, run.stop
        self.damaged = False
        self._run = run

    @classmethod
    def all(cls, rows: Sequence[Rows], cuts: tuple[int, ...]) -> tuple[Lent, ...]:
        return tuple(cls(piece) for run in rows for piece in pieces(run, cuts))

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        for part in Lent._last:
            part.fill_(255)
        Lent._last = self.kept().parts
        return Lent._last

    def kept(self) -> Rows:
        if self.damaged:
            raise Corrupt("these rows are damaged")
        return replace(self._run, parts=tuple(part.clone() for part in self._run.parts))
