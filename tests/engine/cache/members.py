"""A synthetic model for every kind of memory, and what it must have read.

Rows are functions of (token, position), rows of blocks of the block's tokens, point state of all tokens so
far. So whatever a memory gives back can be told from the tokens of the sequence alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch

from engine.batch import Batch, Ints, Segment, Ubatch
from engine.cache.cells import CellTable
from engine.cache.memory import (
    KEYS,
    NULL_TOKEN,
    VALUES,
    Basis,
    BlocksSpec,
    Held,
    Memory,
    MemoryNeeds,
    MemorySpec,
    PartNeed,
    Plan,
    PointSpec,
    RowsSpec,
    Turned,
    View,
    WindowSpec,
    keys_and_values,
)
from engine.cache.parts_memory import PartsMemory
from engine.cache.rows import Slot
from engine.state import PartKind, SeqId
from tests.engine.cache.harness import CPU, batch_of, rotary

WINDOW = 3
#: how many tokens back the synthetic model looks
BACK = 6
SCALE = 0.5
#: query heads of one key head
GROUP = 2


def _latent(layer: int, size: int, window: WindowSpec | None = None) -> RowsSpec:
    """Keys that hold the values, RoPE behind them."""
    turned = Turned(rotary(size // 2), size // 2)
    return RowsSpec(KEYS, layer, 1, size, turned=turned, window=window, value_size=size // 2)


def _index(layer: int, size: int) -> RowsSpec:
    return RowsSpec("idx.k", layer, 1, size, turned=Turned(rotary(size // 2)), basis=Basis.ROTATED)


def _hash(layer: int) -> PointSpec:
    return PointSpec("ssm.state", layer, (2, 3))


def parts_of_kind(kind: str, size: int = 4, window: int = WINDOW) -> tuple[PartNeed, ...]:
    """Parts of two or three layers that make `kind`, with blocks of two and three tokens."""
    rope, short = rotary(size), WindowSpec(window)
    plain = keys_and_values(0, 1, size, size, rope)
    sliding = keys_and_values(1, 1, size, size, rope, short)
    parts: Mapping[str, tuple[PartNeed, ...]] = {
        "kv": (*plain, *keys_and_values(1, 2, size, size, None)),
        "iswa": (*plain, *sliding, *keys_and_values(2, 1, size, size, rope, WindowSpec(2, chunked=True))),
        "dsa": (_latent(0, size), _index(0, size), _latent(1, size)),
        "dsa_iswa": (_latent(0, size), _index(0, size), _latent(1, size, short)),
        "dsv4": (
            _latent(0, size, short),
            _latent(1, size, short),
            BlocksSpec("csa.k", 0, size, 2),
            BlocksSpec("lid.k", 0, size, 2, basis=Basis.ROTATED),
            BlocksSpec("hca.k", 1, size, 3),
            PointSpec("csa.ring", 0, (4, size)),
            PointSpec("hca.ring", 1, (3, size)),
        ),
        "msa": (*plain, _index(0, size)),
        "recurrent": (_hash(0), PointSpec("ssm.conv", 1, (3,))),
        "hybrid": (*plain, _hash(1)),
        "hybrid_iswa": (*plain, *sliding, _hash(1)),
        "hybrid_idx": (*plain, BlocksSpec("pool.k", 0, size, 3), _hash(1), PointSpec("ple.conv", 0, (2,))),
    }
    return parts[kind]


def member_spec(
    kind: str,
    *,
    size: int = 4,
    window: int = WINDOW,
    types: tuple[str, str] = ("f32", "f32"),
    dtype: torch.dtype = torch.float32,
    num_cells: int = 96,
    num_seqs: int = 3,
    max_batch: int = 32,
    max_ubatch: int = 32,
    full_windows: bool = False,
    keep_tail: int = 0,
    checkpoint_bytes: int = 2**20,
    rollback: int = 0,
) -> MemorySpec:
    needs = MemoryNeeds(kind, parts_of_kind(kind, size, window))
    return MemorySpec(
        needs,
        num_cells,
        num_seqs,
        max_batch,
        max_ubatch,
        *types,
        dtype,
        CPU,
        full_windows,
        keep_tail,
        checkpoint_bytes,
        rollback,
    )


# -- what values must be ---------------------------------------------------------------------------


@cache
def raw(name: str, what: int | tuple[int, ...], layer: int, heads: int, size: int) -> torch.Tensor:
    """float32 [heads, size] that no other (name, what, layer) has."""
    seed = zlib.crc32(repr((name, what, layer)).encode())
    return torch.randn((heads, size), generator=torch.Generator().manual_seed(seed))


def rows_of(need: RowsSpec, tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """float32 [tokens, heads, size]."""
    if not len(tokens):
        return torch.zeros((0, need.heads, need.size))
    rows = torch.stack([raw(need.name, int(token), need.layer, need.heads, need.size) for token in tokens])
    if need.turned is not None:
        values = slice(need.turned.start, need.turned.start + need.turned.rotary.n_rot)
        at = torch.tensor(list(positions), dtype=torch.int64)
        rows[..., values] = need.turned.rotary.rotate(rows[..., values], at)
    return rows


def block_rows(need: BlocksSpec, tokens: Sequence[int]) -> torch.Tensor:
    """float32 [blocks, size] of all blocks that close within `tokens`, the first of which is at 0."""
    closed = len(tokens) // need.block
    blocks = [tuple(tokens[i * need.block : (i + 1) * need.block]) for i in range(closed)]
    rows = [raw(need.name, block, need.layer, 1, need.size)[0] for block in blocks]
    return torch.stack(rows) if rows else torch.zeros((0, need.size))


def step(state: torch.Tensor, token: int, position: int) -> torch.Tensor:
    """A running hash, exact in float32, of states [..., values]: order and positions matter."""
    mixed = state * 31 + (token % 8191 + 7 * position + 1)
    return (mixed + torch.arange(state.shape[-1])) % 8191


def state_after(need: PointSpec, tokens: Sequence[int]) -> torch.Tensor:
    """float32 [*shape]: the point state behind `tokens`."""
    state = torch.zeros(need.shape)
    for token, position in zip(tokens, range(len(tokens)), strict=True):
        state = step(state, token, position)
    return state


def queries(need: RowsSpec, tokens: Sequence[int]) -> torch.Tensor:
    """float32 [tokens, heads, size]; not turned, since nothing here depends on it."""
    return torch.stack([raw("q", int(token), need.layer, GROUP * need.heads, need.size) for token in tokens])


def definition(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention in float64, head by head and query by query: `visible` is bool [queries, keys] or
    [kv heads, queries, keys]."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros((q.shape[0], q.shape[1], v.shape[2]), dtype=torch.float64)
    q, k, v = q.double(), k.double(), v.double()
    for head in range(q.shape[1]):
        for i in range(q.shape[0]):
            seen = visible[i] if visible.dim() == 2 else visible[head // group, i]
            scores = k[seen, head // group] @ q[i, head] * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = scores.exp()
            total = weights.sum() + (0 if sinks is None else sinks[head].double().exp())
            out[i, head] = (weights / total) @ v[seen, head // group]
    return out


def visible_to(at: Sequence[int], positions: Sequence[int], window: WindowSpec | None) -> torch.Tensor:
    """bool [queries, keys] by the definitions of causal sight and of windows."""
    out = torch.zeros((len(at), len(positions)), dtype=torch.bool)
    for i, query in enumerate(at):
        for j, key in enumerate(positions):
            out[i, j] = key <= query
            if window is not None:
                near = (
                    key // window.size == query // window.size
                    if window.chunked
                    else query - key < window.size
                )
                out[i, j] &= near
    return out


# -- the model -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Seen:
    """What the layers of one pass were given."""

    attended: dict[int, torch.Tensor] = field(default_factory=dict)
    held: dict[tuple[str, int, Segment], Held] = field(default_factory=dict)
    blocks: dict[tuple[str, int, Segment], torch.Tensor] = field(default_factory=dict)
    points: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    previous: Ints = field(default_factory=lambda: np.zeros((0, BACK), np.int64))

    def tensors(self) -> list[torch.Tensor]:
        held = [held.rows for held in self.held.values()]
        return [*self.attended.values(), *held, *self.blocks.values(), *self.points.values()]


def compute(memory_spec: MemorySpec, ubatch: Ubatch, view: View) -> Seen:
    """One pass of the synthetic model."""
    seen = Seen()
    tokens, positions = ubatch.tokens.tolist(), ubatch.positions.tolist()
    seen.previous = view.previous_tokens(BACK)
    needs = memory_spec.needs.parts
    rows = {(need.name, need.layer): need for need in needs if isinstance(need, RowsSpec)}
    made = {key: rows_of(need, tokens, positions).to(memory_spec.dtype) for key, need in rows.items()}
    for (name, layer), need in rows.items():
        if name == KEYS:
            q = queries(need, tokens).to(memory_spec.dtype)
            k, v = made[name, layer], made.get((VALUES, layer))
            seen.attended[layer] = view.attend(layer, q, k, v, SCALE)
        elif name != VALUES:
            view.append(name, layer, made[name, layer])
        if name != VALUES:
            for segment in view.segments:
                held = view.held(name, layer, segment)
                seen.held[name, layer, segment] = Held(held.rows.clone(), held.positions)
    for need in needs:
        if isinstance(need, BlocksSpec):
            for segment in view.segments:
                closing = _closing(need, segment, tokens, positions, seen.previous)
                view.close(need.name, need.layer, segment, closing.to(memory_spec.dtype))
                seen.blocks[need.name, need.layer, segment] = view.blocks(
                    need.name, need.layer, segment
                ).clone()
        elif isinstance(need, PointSpec):
            before = view.point(need.name, need.layer)
            seen.points[need.name, need.layer] = before.clone()
            after = [
                _newest(view.newest, before[i], tokens[s.start : s.stop], positions[s.start : s.stop])
                for i, s in enumerate(view.segments)
            ]
            view.set_point(need.name, need.layer, torch.stack(after))
    return seen


def _closing(
    need: BlocksSpec, segment: Segment, tokens: list[int], positions: list[int], previous: Ints
) -> torch.Tensor:
    """Rows of the blocks that end within a segment, of its tokens and those before them."""
    rows = []
    for at in range(segment.start, segment.stop):
        if (positions[at] + 1) % need.block == 0:
            block = (*previous[at, BACK - need.block + 1 :].tolist(), tokens[at])
            rows.append(raw(need.name, block, need.layer, 1, need.size)[0])
    return torch.stack(rows) if rows else torch.zeros((0, need.size))


def _newest(newest: int, state: torch.Tensor, tokens: list[int], positions: list[int]) -> torch.Tensor:
    states = []
    for token, position in zip(tokens, positions, strict=True):
        state = step(state, token, position)
        states.append(state)
    return torch.stack(states[-newest:])


#: (token, position) of everything that a sequence holds, in order.
Line = Sequence[tuple[int, int]]


def check_seen(
    memory_spec: MemorySpec, ubatch: Ubatch, seen: Seen, lines: Mapping[int, Line], memory: PartsMemory
) -> None:
    """That a pass was given what the tokens of its sequences say; `lines` go on to the batch's end or
    beyond. Rows are f32."""
    needs = memory_spec.needs.parts
    for index, segment in enumerate(ubatch.segments):
        at = ubatch.positions[segment.start : segment.stop].tolist()
        line = [(token, position) for token, position in lines[segment.seq] if position <= at[-1]]
        tokens, positions = [token for token, _ in line], [position for _, position in line]
        by_position = dict(zip(positions, tokens, strict=True))
        for row, position in zip(seen.previous[segment.start : segment.stop], at, strict=True):
            wanted = [by_position.get(p, NULL_TOKEN) for p in range(position - BACK, position)]
            assert row.tolist() == wanted
        for need in needs:
            key = need.name, need.layer
            match need:
                case RowsSpec(name=name) if name != VALUES:
                    first = 0 if need.window is None else int(need.window.first_visible(np.array(at))[0])
                    kept = [i for i, position in enumerate(positions) if position >= first]
                    held = seen.held[(*key, segment)]
                    assert held.positions.tolist() == [positions[i] for i in kept]
                    wanted_rows = rows_of(need, [tokens[i] for i in kept], [positions[i] for i in kept])
                    assert torch.allclose(plain(memory, key, held.rows), wanted_rows, atol=1e-4)
                    if name == KEYS:
                        out = seen.attended[need.layer][segment.start : segment.stop]
                        own = ubatch.tokens[segment.start : segment.stop].tolist()
                        wanted_out = _attended(memory_spec, need, own, at, tokens, positions)
                        assert torch.allclose(out.double(), wanted_out, atol=1e-4)
                case BlocksSpec():
                    blocks = plain(memory, key, seen.blocks[(*key, segment)])
                    assert torch.allclose(blocks, block_rows(need, tokens), atol=1e-4)
                case PointSpec():
                    before = [i for i, position in enumerate(positions) if position < at[0]]
                    wanted_state = state_after(need, [tokens[i] for i in before])
                    assert torch.equal(seen.points[key][index], wanted_state)


def _attended(
    memory_spec: MemorySpec,
    need: RowsSpec,
    own: Sequence[int],
    at: Sequence[int],
    tokens: Sequence[int],
    positions: Sequence[int],
) -> torch.Tensor:
    k = rows_of(need, tokens, positions)
    of_layer = {part.name: part for part in memory_spec.needs.parts if part.layer == need.layer}
    values = of_layer.get(VALUES)
    if isinstance(values, RowsSpec):
        v = rows_of(values, tokens, positions)
    else:
        v = k[..., : need.value_size]
    return definition(queries(need, own), k, v, visible_to(at, positions, need.window), SCALE)


def plain(memory: PartsMemory, key: tuple[str, int], rows: torch.Tensor) -> torch.Tensor:
    """Rows out of the basis that they are stored in."""
    parts = memory._parts
    buffer = parts.blocks[key].buffer if key in parts.blocks else parts.rows[key].buffer
    return rows.float() if buffer.hadamard is None else buffer.hadamard.rotate(rows.float())


# -- driving ---------------------------------------------------------------------------------------


def compute_plan(memory_spec: MemorySpec, plan: Plan) -> list[Seen]:
    """Every ubatch of a plan, which is left open."""
    return [compute(memory_spec, ubatch, plan.apply(index)) for index, ubatch in enumerate(plan.ubatches)]


def feed(memory_spec: MemorySpec, memory: Memory, *parts: tuple[SeqId, Sequence[int]]) -> list[Seen]:
    """Append tokens to sequences, and commit."""
    return feed_batch(memory_spec, memory, next_batch(memory, *parts))


def feed_batch(memory_spec: MemorySpec, memory: Memory, batch: Batch) -> list[Seen]:
    plan = memory.plan(batch)
    seen = compute_plan(memory_spec, plan)
    plan.commit()
    return seen


class Lines:
    """A memory whose sequences are followed: what each pass reads and what is stored is checked."""

    def __init__(self, memory_spec: MemorySpec, memory: PartsMemory) -> None:
        self.spec = memory_spec
        self.memory = memory
        self.tokens: list[list[int]] = [[] for _ in range(memory_spec.num_seqs)]

    def feed(self, *parts: tuple[SeqId, Sequence[int]]) -> None:
        batch = next_batch(self.memory, *parts)
        plan = self.memory.plan(batch)
        seen = compute_plan(self.spec, plan)
        plan.commit()
        for seq, tokens in parts:
            self.tokens[seq].extend(tokens)
        lines = {seq: self.line(SeqId(seq)) for seq in range(len(self.tokens))}
        for ubatch, one in zip(plan.ubatches, seen, strict=True):
            check_seen(self.spec, ubatch, one, lines, self.memory)
        self.check()

    def copy(self, source: SeqId, target: SeqId, stop: int | None = None) -> None:
        self.memory.copy(source, target, 0, stop)
        self.tokens[target] = self.tokens[source][:stop]
        self.check()

    def cut(self, seq: SeqId, length: int) -> None:
        self.memory.remove(seq, length, None)
        self.tokens[seq] = self.tokens[seq][:length]
        self.check()

    def check(self) -> None:
        for seq in map(SeqId, range(len(self.tokens))):
            check_stored(self.memory, seq, self.line(seq))

    def line(self, seq: SeqId) -> Line:
        return [(token, position) for position, token in enumerate(self.tokens[seq])]


def next_batch(memory: Memory, *parts: tuple[SeqId, Sequence[int]]) -> Batch:
    ends = {seq: memory.pos_max(seq) for seq, _ in parts}
    return batch_of(*((seq, 0 if (end := ends[seq]) is None else end + 1, tokens) for seq, tokens in parts))


def tiny_memory(memory_spec: MemorySpec, window_cells: int | None = None) -> PartsMemory:
    """A memory whose window rows wrap after `window_cells`; None: as many as windows and batches ask."""
    windows = [need.window for need in memory_spec.needs.parts if isinstance(need, RowsSpec) and need.window]
    base = CellTable(memory_spec.num_cells, memory_spec.num_seqs)
    if not windows:
        return PartsMemory(memory_spec, base, None)
    if memory_spec.full_windows:
        return PartsMemory(memory_spec, base, CellTable(memory_spec.num_cells, memory_spec.num_seqs))
    longest = max(window.size for window in windows)
    cells = window_cells or memory_spec.num_seqs * (longest + memory_spec.max_batch)
    return PartsMemory(memory_spec, base, CellTable(cells, memory_spec.num_seqs, longest))


# -- looking inside: tests may ---------------------------------------------------------------------


def stored(
    memory: PartsMemory, seq: SeqId, kind: PartKind | None = None
) -> dict[tuple[str, int], tuple[list[int], torch.Tensor]]:
    """By part: the positions (numbers of blocks) that a sequence holds, and the bytes of each row."""
    out = {}
    for part in memory._parts.stored:
        if kind not in (None, part.spec.kind):
            continue
        cells = part.table.cells_of(seq)
        rows = part.buffer.read_bytes(Slot.of(cells, CPU))
        out[part.need.name, part.need.layer] = part.table.positions[cells].tolist(), rows
    return out


def everything(memory: PartsMemory) -> list[object]:
    """All that can be seen of a memory: what must be equal where nothing changed."""
    out: list[object] = [memory.free_cells()]
    for seq in map(SeqId, range(memory._spec.num_seqs)):
        out.append((memory.pos_min(seq), memory.pos_max(seq), memory.tokens_at(seq, 0, 10**6)))
        out += [(key, at, rows.numpy().tobytes()) for key, (at, rows) in stored(memory, seq).items()]
        out += [part.buffer.read_bytes(seq).numpy().tobytes() for part in memory._parts.points.values()]
        kept = {at: memory._checkpoints.at(seq, at) for at in memory._checkpoints.positions(seq)}
        kept |= {-at: memory._trails.at(seq, at) for at in memory._trails.positions(seq)}
        out += [(at, [part.numpy().tobytes() for part in frozen or ()]) for at, frozen in kept.items()]
    return out


def check_stored(memory: PartsMemory, seq: SeqId, line: Line) -> None:
    """That what a sequence holds is what its tokens say; rows are f32."""
    tokens, positions = [token for token, _ in line], [position for _, position in line]
    assert memory.tokens_at(seq, 0, 10**6) == tuple(tokens)
    windowed = memory._tables.windowed
    for part in memory._parts.stored:
        key = part.need.name, part.need.layer
        cells = part.table.cells_of(seq)
        rows = part.buffer.read_plain(Slot.of(cells, CPU))
        held = part.table.positions[cells].tolist()
        if isinstance(part.need, BlocksSpec):
            assert held == list(range(len(tokens) // part.need.block)), key
            assert torch.allclose(rows[:, 0], block_rows(part.need, tokens), atol=1e-4), key
            continue
        dropped = len(line) - len(held)
        if dropped:
            assert part.table is windowed
            assert windowed.window is not None
            assert held
            assert held[0] <= positions[-1] + 1 - windowed.window
        assert held == positions[dropped:], key
        assert torch.allclose(rows, rows_of(part.need, tokens[dropped:], held), atol=1e-4), key
    for point in memory._parts.points.values():
        assert torch.equal(point.buffer.read([seq])[0], state_after(point.need, tokens)), point.need.name
