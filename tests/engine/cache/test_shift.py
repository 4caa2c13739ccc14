"""Moved keys are the keys of the new positions: in every basis, for touched cells only, once and again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.cache.memory import MemoryNeeds, MemorySpec, keys_and_values
from engine.cache.parts_memory import PartsMemory
from engine.cache.rows import Slot
from engine.cache.table import build_memory
from engine.errors import EditRefused, NoSlot
from tests.engine.cache.harness import (
    CPU,
    A,
    B,
    Layer,
    buffers,
    dense,
    feed,
    held_rows,
    keys,
    layers_of,
    queries,
    spec,
    values,
    visible,
)

#: what re-quantizing may cost, as a share of the size of keys
LOSS = {"f32": 1e-6, "f16": 1e-3, "bf16": 8e-3, "q8_0": 1e-2, "q5_0": 0.07, "q4_0": 0.14}


def fed(memory_spec: MemorySpec, count: int = 20) -> PartsMemory:
    memory = build_memory(memory_spec)
    feed(memory_spec, memory, (A, range(count)))
    return memory


def error(memory: PartsMemory, layer: Layer, tokens: list[int], positions: list[int]) -> float:
    """How far the keys that A holds are from what they must be, relative to their size."""
    at, k, _ = held_rows(memory, layer.layer, A)
    assert at.tolist() == positions
    expected = keys(tokens, positions, layer)
    return float((k - expected).norm() / expected.norm())


@pytest.mark.parametrize("n_rot", [None, 32, 16], ids=["full rotary", "half", "quarter"])
@pytest.mark.parametrize("size", [64, 96])
@pytest.mark.parametrize("dtype", LOSS)
def test_shifted_keys_are_those_of_the_new_positions(dtype: str, size: int, n_rot: int | None) -> None:
    memory_spec = spec(size=size, n_rot=n_rot, types=(dtype, "f32"))
    memory = fed(memory_spec)
    (layer,) = layers_of(memory_spec)
    before = error(memory, layer, list(range(20)), list(range(20)))
    memory.remove(A, 3, 8)
    memory.shift(A, 8, None, -5)
    tokens = [0, 1, 2, *range(8, 20)]
    after = error(memory, layer, tokens, list(range(15)))
    assert after < 1.6 * before + LOSS[dtype] / 2
    assert torch.equal(held_rows(memory, 0, A)[2], values(tokens, layer))


@pytest.mark.parametrize("dtype", ["f32", "q8_0"])
def test_attention_after_a_shift_is_that_of_a_text_without_the_gap(dtype: str) -> None:
    memory_spec = spec(size=64, types=(dtype, "f32"))
    memory = fed(memory_spec)
    memory.remove(A, 3, 8)
    memory.shift(A, 8, None, -5)
    tokens = [0, 1, 2, *range(8, 20), 50]
    ((out,),) = feed(memory_spec, memory, (A, [50]))
    (layer,) = layers_of(memory_spec)
    expected = dense(queries([50], layer, 4), [15], tokens, range(16), layer)
    # Nearly all of the softmax falls on one key here, so that small errors of scores are seen.
    assert (out.double() - expected).abs().max() < (1e-4 if dtype == "f32" else 0.2)


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0", "f32"])
def test_only_touched_cells_change(dtype: str) -> None:
    memory_spec = spec(size=64, types=(dtype, dtype))
    memory = fed(memory_spec)
    feed(memory_spec, memory, (B, range(500, 509)))
    stored = [buffer.read_bytes(Slot(0, 96, None)) for buffer in buffers(memory, 0)]
    cells = memory._tables.base.cells_of(A)
    memory.shift(A, 12, None, 7)
    changed = [
        (buffer.read_bytes(Slot(0, 96, None)) != old).any(1).nonzero().flatten().tolist()
        for buffer, old in zip(buffers(memory, 0), stored, strict=True)
    ]
    assert changed == [cells[12:].tolist(), []]
    memory.shift(A, 0, None, 0)
    memory.divide(A, 0, None, 1)
    assert (buffers(memory, 0)[0].read_bytes(Slot(0, 96, None)) != stored[0]).any(1).sum() == 8


def test_the_magnitude_is_applied_once_however_often_keys_move() -> None:
    memory_spec = spec(magnitude=1.347)
    memory = fed(memory_spec)
    for delta in (5, -3, 40, -42):
        memory.shift(A, 0, None, delta)
    assert error(memory, layers_of(memory_spec)[0], list(range(20)), list(range(20))) < 1e-5


def test_division_turns_keys_the_right_way() -> None:
    memory_spec = spec()
    memory = fed(memory_spec)
    memory.divide(A, 0, None, 4)
    assert error(memory, layers_of(memory_spec)[0], list(range(20)), [p // 4 for p in range(20)]) < 1e-5
    with pytest.raises(EditRefused, match="divided by 0"):
        memory.divide(A, 0, None, 0)


def test_keys_without_rope_only_get_new_positions() -> None:
    memory_spec = spec()
    plain = keys_and_values(1, 2, 8, 8, None)
    memory = build_memory(replace(memory_spec, needs=MemoryNeeds("kv", (*memory_spec.needs.parts, *plain))))
    feed(memory_spec, memory, (A, range(8)))  # layer 0 alone, with recognisable rows
    rows = torch.randn((8, 2, 8))
    slot = Slot.of(memory._tables.base.cells_of(A), CPU)
    for buffer in buffers(memory, 1):
        buffer.write(slot, rows)
    memory.copy(A, B)
    memory.shift(A, 0, None, 30)
    for seq in (A, B):
        _, k, v = held_rows(memory, 1, seq)
        assert torch.equal(k, rows)
        assert torch.equal(v, rows)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "q5_0"])
def test_who_shares_a_cell_notices_nothing_of_a_shift(dtype: str) -> None:
    memory_spec = spec(size=64, types=(dtype, dtype), num_cells=60)
    memory = fed(memory_spec)
    memory.copy(A, B)
    feed(memory_spec, memory, (B, range(700, 705)))
    before = [tensor.tolist() for tensor in held_rows(memory, 0, A)]
    free = memory.free_cells()
    memory.shift(B, 10, None, 4)
    assert [tensor.tolist() for tensor in held_rows(memory, 0, A)] == before
    assert memory.free_cells() == free - 10
    positions, k, v = held_rows(memory, 0, B)
    tokens = [*range(20), *range(700, 705)]
    assert positions.tolist() == [*range(10), *range(14, 29)]
    expected = keys(tokens, positions.tolist(), layers_of(memory_spec)[0])
    assert (k - expected).norm() / expected.norm() < 1.5 * LOSS[dtype] + 1e-6
    assert v[:20].tolist() == before[2]


def test_a_shift_without_room_for_its_copies_changes_nothing() -> None:
    memory_spec = spec(num_cells=24)
    memory = fed(memory_spec)
    memory.copy(A, B)
    before = visible(memory)
    with pytest.raises(NoSlot):
        memory.shift(B, 10, None, 4)
    with pytest.raises(EditRefused, match="would be at position 3"):
        memory.shift(A, 4, None, -1)
    assert visible(memory) == before
    memory.shift(None, 10, None, 4)
    assert memory.pos_max(A) == memory.pos_max(B) == 23
    memory.shift(B, 22, None, 4)


def test_what_would_get_a_negative_position_is_dropped() -> None:
    memory_spec = spec()
    memory = fed(memory_spec)
    memory.shift(A, 0, None, -6)
    assert error(memory, layers_of(memory_spec)[0], list(range(6, 20)), list(range(14))) < 1e-5
    assert memory.free_cells() == 96 - 14
