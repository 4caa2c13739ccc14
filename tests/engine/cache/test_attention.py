"""Attention over cells: what is seen, and that nothing but the seen matters."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.cache.attention import Scoring, attend, build_mask, grouped
from engine.cache.cells import CellTable
from engine.cache.memory import MemorySpec, WindowSpec
from engine.cache.parts_memory import PartsMemory
from engine.cache.table import build_memory
from tests.engine.cache.harness import (
    A,
    B,
    C,
    batch_of,
    buffers,
    dense,
    feed,
    feed_plan,
    interleaved,
    layers_of,
    masked,
    queries,
    spec,
)

WINDOWS = (None, WindowSpec(5), WindowSpec(4, chunked=True))


def memories(kind: str, **options: object) -> tuple[MemorySpec, PartsMemory]:
    memory_spec = spec(*WINDOWS, **options)  # type: ignore[arg-type]
    return memory_spec, (masked if kind == "kv" else build_memory)(memory_spec)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("kind", ["kv", "iswa"])
def test_every_token_sees_what_the_definition_says(kind: str, group: int, softcap: float | None) -> None:
    memory_spec, memory = memories(kind, max_ubatch=7)
    for seq, first in ((A, 100), (B, 200)):
        fed: list[int] = []
        for count in (1, 11, 1, 3, 16, 1):
            tokens = list(range(first + len(fed), first + len(fed) + count))
            outputs = feed(memory_spec, memory, (seq, tokens), group=group, softcap=softcap)
            at = range(len(fed), len(fed) + count)
            fed += tokens
            for layer in layers_of(memory_spec):
                out = torch.cat([ubatch[layer.layer] for ubatch in outputs])
                q = queries(tokens, layer, 2 * group)
                expected = dense(q, at, fed, range(len(fed)), layer, softcap)
                assert torch.allclose(out.double(), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["kv", "iswa"])
def test_sequences_of_one_batch_do_not_see_each_other(kind: str) -> None:
    memory_spec, memory = memories(kind, max_ubatch=5)
    parts = ((A, 0, range(100, 109)), (B, 0, range(200, 204)), (C, 0, range(300, 307)))
    batch = interleaved(batch_of(*parts), seed=3)
    plan = memory.plan(batch)
    outputs = feed_plan(memory_spec, plan)
    plan.commit()
    for layer in layers_of(memory_spec):
        out = torch.cat([ubatch[layer.layer] for ubatch in outputs])
        for seq, _, tokens in parts:
            q = queries(tokens, layer, 4)
            expected = dense(q, range(len(tokens)), tokens, range(len(tokens)), layer)
            assert torch.allclose(out[batch.seqs == seq].double(), expected, atol=1e-5)


def test_heads_of_values_may_be_smaller_than_those_of_keys() -> None:
    memory_spec = spec(size=16, size_v=8)
    (outputs,) = feed(memory_spec, build_memory(memory_spec), (A, range(9)))
    layer = layers_of(memory_spec)[0]
    expected = dense(queries(range(9), layer, 4), range(9), range(9), range(9), layer)
    assert torch.allclose(outputs[0].double(), expected, atol=1e-5)


SHAPES = ((9, 3, 64), (4, 1, 256), (4, 4, 80), (6, 2, 40))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_in_place_and_gathered_rows_give_equal_bits(
    shape: tuple[int, int, int], dtype: torch.dtype, softcap: float | None
) -> None:
    heads, kv_heads, size = shape
    make = torch.Generator().manual_seed(1)
    for tokens in (1, 2, 33):
        for depth in (tokens, tokens + 17, 700, 1537):
            q = torch.randn((tokens, heads, size), generator=make).to(dtype)
            k = torch.randn((depth, kv_heads, size), generator=make).to(dtype)
            v = torch.randn((depth, kv_heads, size), generator=make).to(dtype)
            at = np.arange(depth - tokens, depth)
            mask = grouped(build_mask(at, np.arange(depth), None, dtype, k.device), heads // kv_heads)
            scoring = Scoring(size**-0.5, softcap)
            expected = attend(q, k, v, mask, scoring)
            for offset in (1, 3, 7, 13):
                wide_k, wide_v = torch.zeros((2, depth + 20, kv_heads, size), dtype=dtype)
                here, there = slice(offset, offset + depth), slice(offset + 2, offset + 2 + depth)
                wide_k[here], wide_v[there] = k, v
                assert torch.equal(attend(q, wide_k[here], wide_v[there], mask, scoring), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (1, 1, 20)], ids=str)
def test_queries_give_equal_bits_wherever_they_begin(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    heads, kv_heads, size = shape
    make = torch.Generator().manual_seed(1)
    k, v = torch.randn((2, 300, kv_heads, size), generator=make).to(dtype)
    for tokens in (1, 5):
        q = torch.randn((tokens, heads, size), generator=make).to(dtype)
        expected = attend(q, k, v, None, Scoring(size**-0.5))
        for offset in range(1, 9):
            wide = torch.zeros(offset + q.numel(), dtype=dtype)
            wide[offset:] = q.flatten()
            assert torch.equal(attend(wide[offset:].view(q.shape), k, v, None, Scoring(size**-0.5)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("depth", [1535, 1536, 1537, 2000, 2049, 2560, 17_001])
def test_a_key_counts_once_however_many_there_are(
    depth: int, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    heads, kv_heads, size = shape
    make = torch.Generator().manual_seed(depth)
    q = 2 * torch.randn((1, heads, size), generator=make).to(dtype)
    k, v = torch.randn((2, depth, kv_heads, size), generator=make).to(dtype)
    scores = torch.einsum("hgd,khd->hgk", q[0].view(kv_heads, -1, size).double(), k.double()) / size**0.5
    expected = torch.einsum("hgk,khd->hgd", scores.softmax(-1), v.double()).view(1, heads, size)
    found = attend(q, k, v, None, Scoring(size**-0.5))
    assert found.dtype is dtype
    assert torch.allclose(found.double(), expected, rtol=0, atol=1e-6 if dtype is torch.float32 else 8e-3)


class Shuffled(CellTable):
    """Gives cells in an order of its own."""

    def __init__(self, num_cells: int, num_seqs: int, window: int | None, seed: int) -> None:
        super().__init__(num_cells, num_seqs, window)
        self._random = np.random.default_rng(seed)

    def find_slot(self, requests):  # type: ignore[no-untyped-def]
        found = super().find_slot(requests)
        pool = self._random.permutation(np.flatnonzero(self.takeable()))
        counts = np.cumsum([len(cells) for cells in found])
        return np.split(pool[: counts[-1]], counts[:-1])


TYPES = [("f32", "f32"), ("bf16", "bf16"), ("f16", "bf16"), ("q8_0", "q5_0"), ("q4_0", "q8_0")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("types", TYPES, ids="-".join)
def test_the_order_of_cells_does_not_change_a_bit(types: tuple[str, str], dtype: torch.dtype) -> None:
    window = WindowSpec(24)
    memory_spec = spec(None, window, size=64, types=types, dtype=dtype, num_cells=301, max_batch=64)

    def outputs(base: CellTable, windowed: CellTable) -> list[list[torch.Tensor]]:
        memory = PartsMemory(memory_spec, base, windowed)
        out = []
        for count in (40, 1, 1, 17, 1, 33, 1):
            first = memory.pos_max(A)
            start = 0 if first is None else first + 1
            out += feed(memory_spec, memory, (A, range(start, start + count)), (B, range(900, 902)), group=3)
        return out

    expected = outputs(CellTable(301, 3), CellTable(301, 3, 24))
    for seed in range(2):
        shuffled = outputs(Shuffled(301, 3, None, seed), Shuffled(301, 3, 24, seed))
        for one, other in zip(expected, shuffled, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_cells_that_nobody_owns_do_not_matter_whatever_they_hold() -> None:
    memory_spec, clean = memories("iswa")
    _, dirty = memories("iswa")
    for layer in range(len(WINDOWS)):
        keys, values = buffers(dirty, layer)
        keys._data.fill_(float("nan"))
        values._data.fill_(float("inf"))
    for tokens in (range(20), range(20, 21), range(21, 30)):
        one, other = feed(memory_spec, clean, (A, tokens)), feed(memory_spec, dirty, (A, tokens))
        assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))


def test_a_lone_query_and_full_sight_need_no_mask() -> None:
    cpu = torch.device("cpu")
    assert build_mask(np.array([7]), np.arange(8), None, torch.float32, cpu) is None
    assert build_mask(np.array([7, 7]), np.arange(8), None, torch.float32, cpu) is None
    mask = build_mask(np.array([1, 2]), np.arange(3), WindowSpec(2), torch.float32, cpu)
    assert mask is not None
    assert (mask == 0).tolist() == [[True, True, False], [False, True, True]]
