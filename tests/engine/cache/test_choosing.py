"""Rows that are read by name, and attention to chosen ones, with sinks: against the definitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine.batch import Ubatch
from engine.cache import attention
from engine.cache.attention import Scoring, attend, narrowed
from engine.cache.memory import KEYS, Chosen, MemoryNeeds, MemorySpec, RowsSpec, View, WindowSpec
from engine.cache.parts_memory import PartsMemory
from engine.cache.rows import RowBuffer, Slot
from engine.cache.view import BLOCK
from engine.state import SeqId
from tests.engine.cache.harness import A, B, interleaved
from tests.engine.cache.members import (
    SCALE,
    compute,
    definition,
    feed,
    member_spec,
    next_batch,
    plain,
    queries,
    rows_of,
    tiny_memory,
    visible_to,
)

HEADS = 2


def wide_spec(
    window: WindowSpec | None, size: int = 8, latent: bool = False, **options: object
) -> MemorySpec:
    """A layer of two key heads; with `latent` keys that hold the values."""
    memory_spec = member_spec("kv", **options)  # type: ignore[arg-type]
    k = RowsSpec(KEYS, 0, HEADS, size, window=window, value_size=size // 2 if latent else None)
    v = RowsSpec("kv.v", 0, HEADS, size, "type_v", window=window)
    kind = "iswa" if window else "kv"
    return replace(memory_spec, needs=MemoryNeeds(kind, (k,) if latent else (k, v)))


def needs_of(memory_spec: MemorySpec) -> list[RowsSpec]:
    return [need for need in memory_spec.needs.parts if isinstance(need, RowsSpec)]


def attended(
    memory_spec: MemorySpec, memory: PartsMemory, tokens: Sequence[int], seq: SeqId = A, **options: object
) -> tuple[torch.Tensor, Ubatch, View]:
    """Feed tokens as one ubatch, and what the layer attends to. The plan is committed."""
    plan = memory.plan(next_batch(memory, (seq, tokens)))
    (ubatch,) = plan.ubatches
    view = plan.apply(0)
    made = [rows_of(need, tokens, ubatch.positions.tolist()) for need in needs_of(memory_spec)]
    k, v = made if len(made) == 2 else (made[0], None)
    q = queries(needs_of(memory_spec)[0], tokens)
    out = view.attend(0, q, k, v, SCALE, **options)  # type: ignore[arg-type]
    plan.commit()
    return out, ubatch, view


def random_choice(
    queries: int, rows: int, seed: int, heads: int | None = None, share: float = 0.4
) -> torch.Tensor:
    """bool; what each query would choose, its own row always among it."""
    shape = (queries, rows) if heads is None else (heads, queries, rows)
    chosen = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share
    for i in range(queries):
        chosen[..., i, rows - queries + i] = True
    return chosen


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("per_head", [None, False, True], ids=["all", "chosen", "chosen per head"])
@pytest.mark.parametrize("window", [None, WindowSpec(5), WindowSpec(4, chunked=True)], ids=str)
@pytest.mark.parametrize("latent", [False, True])
def test_attention_is_what_its_definition_says(
    latent: bool,
    window: WindowSpec | None,
    per_head: bool | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    memory_spec = wide_spec(window, latent=latent)
    memory, fed = tiny_memory(memory_spec), 0
    k_need = needs_of(memory_spec)[0]
    for count in (6, 1, 11, 1):
        end = fed + count
        at = list(range(fed, end))
        first = 0 if window is None else int(window.first_visible(torch.tensor(at).numpy())[0])
        sight = visible_to(at, range(end), window)
        chosen: Chosen | None = None
        if per_head is not None:
            choice = random_choice(count, end - first, end, HEADS if per_head else None)
            chosen = (choice,)
            sight = sight & torch.nn.functional.pad(choice, (first, 0))
        out, _, _ = attended(memory_spec, memory, at, softcap=softcap, sinks=sinks, chosen=chosen)
        k = rows_of(k_need, range(end), range(end))
        v = (
            k[..., : k_need.value_size]
            if latent
            else rows_of(needs_of(memory_spec)[1], range(end), range(end))
        )
        expected = definition(queries(k_need, at), k, v, sight, SCALE, softcap, sinks)
        assert torch.allclose(out.double(), expected, atol=1e-5)
        fed = end


def test_choices_go_by_segment() -> None:
    memory_spec = wide_spec(None)
    memory = tiny_memory(memory_spec)
    feed(memory_spec, memory, (A, range(5)), (B, range(100, 103)))
    plan = memory.plan(next_batch(memory, (A, range(5, 8)), (B, [103])))
    (ubatch,) = plan.ubatches
    k_need, v_need = needs_of(memory_spec)
    lines = {A: list(range(8)), B: list(range(100, 104))}
    chosen = (random_choice(3, 8, 1), random_choice(1, 4, 2))
    tokens, positions = ubatch.tokens.tolist(), ubatch.positions.tolist()
    k, v = (rows_of(need, tokens, positions) for need in (k_need, v_need))
    out = plan.apply(0).attend(0, queries(k_need, tokens), k, v, SCALE, chosen=chosen)
    for segment, choice in zip(ubatch.segments, chosen, strict=True):
        line = lines[segment.seq]
        k, v = (rows_of(need, line, range(len(line))) for need in (k_need, v_need))
        own = slice(segment.start, segment.stop)
        sight = visible_to(positions[own], range(len(line)), None) & choice
        expected = definition(queries(k_need, tokens[own]), k, v, sight, SCALE)
        assert torch.allclose(out[own].double(), expected, atol=1e-5)
    plan.commit()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("per_head", [None, False, True], ids=["all", "chosen", "chosen per head"])
@pytest.mark.parametrize("window", [None, WindowSpec(5), WindowSpec(4, chunked=True)], ids=str)
def test_segments_of_one_sequence_each_see_their_own_rows(
    window: WindowSpec | None, per_head: bool | None, deterministic: bool
) -> None:
    """Those of a mixed batch, or one for every token."""
    memory_spec = replace(wide_spec(window), deterministic=deterministic)
    memory = tiny_memory(memory_spec)
    feed(memory_spec, memory, (A, range(6)), (B, range(100, 107)))
    batch = interleaved(next_batch(memory, (A, range(6, 14)), (B, [112, 113])), 1)
    plan = memory.plan(batch)
    lines = {A: list(range(14)), B: [*range(100, 107), 112, 113]}
    k_need, v_need = needs_of(memory_spec)
    for index, ubatch in enumerate(plan.ubatches):
        view = plan.apply(index)
        tokens, positions = ubatch.tokens.tolist(), ubatch.positions.tolist()
        k, v = (rows_of(need, tokens, positions) for need in (k_need, v_need))
        chosen, sights = [], []
        for segment in ubatch.segments:
            at = positions[segment.start : segment.stop]
            first = 0 if window is None else int(window.first_visible(np.array(at))[0])
            choice = random_choice(len(at), at[-1] + 1 - first, at[-1], HEADS if per_head else None)
            sight = visible_to(at, range(at[-1] + 1), window)
            chosen.append(choice)
            sights.append(sight if per_head is None else sight & F.pad(choice, (first, 0)))
        out = view.attend(
            0, queries(k_need, tokens), k, v, SCALE, chosen=None if per_head is None else chosen
        )
        for segment, sight in zip(ubatch.segments, sights, strict=True):
            line = lines[segment.seq][: sight.shape[-1]]
            k, v = (rows_of(need, line, range(len(line))) for need in (k_need, v_need))
            own = slice(segment.start, segment.stop)
            expected = definition(queries(k_need, tokens[own]), k, v, sight, SCALE)
            assert torch.allclose(out[own].double(), expected, atol=1e-5)
    plan.commit()


@pytest.mark.parametrize("per_head", [False, True])
def test_choices_reach_over_blocks_of_queries(per_head: bool) -> None:
    count = BLOCK + 7
    memory_spec = wide_spec(None, num_cells=300, max_batch=300, max_ubatch=300)
    memory = tiny_memory(memory_spec)
    choice = random_choice(count, count, 3, HEADS if per_head else None)
    out, _, _ = attended(memory_spec, memory, range(count), chosen=(choice,))
    k, v = (rows_of(need, range(count), range(count)) for need in needs_of(memory_spec))
    sight = visible_to(range(count), range(count), None) & choice
    expected = definition(queries(needs_of(memory_spec)[0], range(count)), k, v, sight, SCALE)
    assert torch.allclose(out.double(), expected, atol=1e-5)


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("latent", [False, True])
def test_few_of_many_rows_are_gathered(
    latent: bool,
    per_head: bool,
    softcap: float | None,
    sinks: torch.Tensor | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some queries at a time, of which some see fewer rows than others, and fewer than they chose."""
    gathered = []
    real = attention._gathered

    def noted(*args: Any) -> torch.Tensor:
        gathered.append(args)
        return real(*args)

    monkeypatch.setattr(attention, "_gathered", noted)
    monkeypatch.setattr(attention, "_GATHERED", 200)
    count = BLOCK + 7
    memory_spec = wide_spec(None, latent=latent, num_cells=300, max_batch=300, max_ubatch=300)
    choice = random_choice(count, count, 3, HEADS if per_head else None, share=0.03)
    tokens, memory = range(count), tiny_memory(memory_spec)
    out, _, _ = attended(memory_spec, memory, tokens, softcap=softcap, sinks=sinks, chosen=(choice,))
    assert len(gathered) == 2
    k_need = needs_of(memory_spec)[0]
    k = rows_of(k_need, tokens, tokens)
    v = k[..., : k_need.value_size] if latent else rows_of(needs_of(memory_spec)[1], tokens, tokens)
    sight = visible_to(tokens, tokens, None) & choice
    expected = definition(queries(k_need, tokens), k, v, sight, SCALE, softcap, sinks)
    assert torch.allclose(out.double(), expected, atol=1e-5)


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_who_chooses_everything_sees_what_all_see(count: int, dtype: torch.dtype) -> None:
    make = torch.Generator().manual_seed(0)
    q = torch.randn((count, 6, 16), generator=make).to(dtype)
    k, v = torch.randn((2, 40, 2, 16), generator=make).to(dtype)
    every = torch.ones((count, 40), dtype=torch.bool)
    plain_out = attend(q, k, v, None, Scoring(0.3))
    for picked in (every, every.expand(2, -1, -1)):
        out = narrowed(q, k, v, None, picked, Scoring(0.3))
        assert torch.allclose(out.float(), plain_out.float(), atol=1e-6 if dtype is torch.float32 else 2e-2)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("dtype", ["f32", "q8_0"])
def test_a_lone_query_reads_no_rows_but_those_that_it_chose(
    dtype: str, per_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory_spec = wide_spec(None, size=32, types=(dtype, dtype))
    memory = tiny_memory(memory_spec)
    feed(memory_spec, memory, (B, range(3)), (A, range(12)))
    feed(memory_spec, memory, (B, range(3, 5)), (A, range(12, 20)))  # cells of A are scattered
    choice = random_choice(1, 21, 5, HEADS if per_head else None)
    read = []
    real = RowBuffer._at

    def counted(buffer: RowBuffer, slot: Slot, head: int | None = None) -> torch.Tensor:
        read.append(len(slot))
        return real(buffer, slot, head)

    monkeypatch.setattr(RowBuffer, "_at", counted)
    out, ubatch, view = attended(memory_spec, memory, [20], chosen=(choice,))
    assert 0 < max(read) <= int(choice.sum(-1).max())
    k, v = (view.held(need.name, 0, ubatch.segments[0]).rows for need in needs_of(memory_spec))
    expected = definition(queries(needs_of(memory_spec)[0], [20]), k, v, choice, SCALE)
    assert torch.allclose(out.double(), expected, atol=1e-5)


def test_rows_of_another_layer_are_read_without_being_written() -> None:
    memory_spec = wide_spec(None)
    memory = tiny_memory(memory_spec)
    feed(memory_spec, memory, (A, range(9)))
    out, ubatch, view = attended(memory_spec, memory, range(9, 12))
    q = queries(needs_of(memory_spec)[0], ubatch.tokens.tolist())
    assert torch.equal(view.attend(0, q, None, None, SCALE), out)


# -- rows by name ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8_0", "q4_0"])
@pytest.mark.parametrize("kind", ["dsa", "msa", "dsa_iswa"])
def test_indexer_keys_are_held_in_a_basis_where_products_with_them_hold(kind: str, dtype: str) -> None:
    memory_spec = member_spec(kind, size=64, types=(dtype, "f32"), max_ubatch=7)
    memory = tiny_memory(memory_spec)
    feed(memory_spec, memory, (A, range(12)), (B, range(50, 55)))
    plan = memory.plan(next_batch(memory, (A, range(12, 15)), (B, range(55, 57))))
    need = next(need for need in needs_of(memory_spec) if need.name == "idx.k")
    assert "idx.k" in memory.rotated
    view = plan.apply(0)
    ubatch = plan.ubatches[0]
    compute(memory_spec, ubatch, view)
    for segment, line in zip(view.segments, (range(15), range(50, 57)), strict=True):
        held = view.held("idx.k", 0, segment)
        assert held.positions.tolist() == list(range(len(line)))
        keys = rows_of(need, line, range(len(line)))
        rotated = held.rows.float()
        x = torch.randn((3, 2, 64), generator=torch.Generator().manual_seed(0))
        scores = torch.einsum("qhd,nd->qhn", view.into_basis("idx.k", 0, x), rotated[:, 0])
        expected = torch.einsum("qhd,nd->qhn", x.double(), keys[:, 0].double())
        loss = {"f32": 1e-5, "bf16": 0.05, "q8_0": 0.1, "q4_0": 1.5}[dtype]
        assert (scores.double() - expected).abs().max() < 8 * loss
        assert not torch.allclose(rotated, keys, atol=0.5)
        back = (plain(memory, ("idx.k", 0), rotated) - keys).norm() / keys.norm()
        assert back < {"f32": 1e-6, "bf16": 4e-3, "q8_0": 1e-2, "q4_0": 0.14}[dtype]
    plan.rollback()


def test_window_rows_are_held_from_the_first_that_is_seen() -> None:
    memory_spec = member_spec("dsv4", window=5)
    memory = tiny_memory(memory_spec)
    feed(memory_spec, memory, (A, range(9)))
    (seen,) = feed(memory_spec, memory, (A, range(9, 12)))
    (held, _) = (rows for (name, _, _), rows in seen.held.items() if name == KEYS)
    assert held.positions.tolist() == list(range(5, 12))


def test_what_is_stored_as_it_is_needs_no_other_basis() -> None:
    memory_spec = wide_spec(None)
    memory = tiny_memory(memory_spec)
    plan = memory.plan(next_batch(memory, (A, [1])))
    x = torch.randn((4, 8))
    assert plan.apply(0).into_basis(KEYS, 0, x) is x
    plan.rollback()
