"""The kinds of memory: each of its parts, no more tables than it needs, and laws that all of them keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.batch import Ints
from engine.cache.cells import CellTable
from engine.cache.memory import (
    Basis,
    BlocksSpec,
    MemoryNeeds,
    PartNeed,
    PointSpec,
    RowsSpec,
    WindowSpec,
    keys_and_values,
)
from engine.cache.table import KINDS, build_memory
from engine.errors import ConfigError
from engine.state import PartKind, SeqId
from tests.engine.cache.harness import A, B, C
from tests.engine.cache.members import Seen, feed, member_spec, parts_of_kind, tiny_memory

every_kind = pytest.mark.parametrize("kind", KINDS)
#: tables of cells: for tokens, for windows, for every size of blocks
TABLES = {"iswa": 2, "dsa_iswa": 2, "hybrid_iswa": 2, "hybrid_idx": 2, "dsv4": 4}


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> list[CellTable]:
    """Every table of cells that is made."""
    made: list[CellTable] = []
    build = CellTable.__init__

    def counted(self: CellTable, num_cells: int, num_seqs: int, window: int | None = None) -> None:
        build(self, num_cells, num_seqs, window)
        made.append(self)

    monkeypatch.setattr(CellTable, "__init__", counted)
    return made


@every_kind
def test_caches_over_the_same_tokens_share_one_table(kind: str, tables: list[CellTable]) -> None:
    memory = build_memory(member_spec(kind))
    assert len(tables) == TABLES.get(kind, 1)
    owners = {id(part.table) for part in memory._parts.stored}
    assert owners <= {id(table) for table in tables}
    by_kind = [
        {id(part.table) for part in memory._parts.stored if part.spec.kind is part_kind}
        for part_kind in (PartKind.TOKEN, PartKind.WINDOW)
    ]
    assert all(len(one) <= 1 for one in by_kind)


@every_kind
def test_layers_cost_no_table(kind: str, tables: list[CellTable]) -> None:
    parts = parts_of_kind(kind)
    more = tuple(replace(part, layer=part.layer + 10 * i) for i in range(5) for part in parts)
    memory = build_memory(replace(member_spec(kind), needs=MemoryNeeds(kind, more)))
    assert len(memory.layout) == 5 * len(parts)
    assert len(tables) == TABLES.get(kind, 1)


@every_kind
def test_layouts_list_parts_by_kind_then_layer_then_name(kind: str) -> None:
    memory = build_memory(replace(member_spec(kind), needs=MemoryNeeds(kind, parts_of_kind(kind)[::-1])))
    order = [(list(PartKind).index(part.kind), part.layer, part.name) for part in memory.layout]
    assert order == sorted(order)
    assert {part.name for part in memory.layout} == {
        f"{need.name}.{need.layer:02}" for need in parts_of_kind(kind)
    }


# -- refusals --------------------------------------------------------------------------------------

K, V = keys_and_values(0, 1, 8, 8, None)
WINDOW_K, LATENT = replace(K, window=WindowSpec(4)), replace(K, value_size=8)
INDEX = RowsSpec("idx.k", 0, 1, 8)
STATE = PointSpec("ssm.state", 0, (3,))
POOLED = BlocksSpec("pool.k", 0, 8, 4)
BAD: list[tuple[str, tuple[PartNeed, ...], str]] = [
    ("ring", (K, V), "memory kind 'ring': there are kv, iswa"),
    ("kv", (V,), "kind 'kv': there is no part kv.k"),
    ("dsa", (K,), "kind 'dsa': there is no part idx.k"),
    ("msa", (K, INDEX), "kind 'msa': there is no part kv.v"),
    ("hybrid_idx", (K, V, STATE), "kind 'hybrid_idx': there is no part pool.k"),
    ("kv", (K,), "kind 'kv': keys of layer 0 have no values"),
    ("kv", (K, V, INDEX), "kind 'kv': it has no part idx.k"),
    ("recurrent", (K, STATE), "kind 'recurrent': it has no part kv.k"),
    ("hybrid", (K, V, POOLED, STATE), "kind 'hybrid': it has no part pool.k"),
    ("kv", (WINDOW_K, V), "kind 'kv': it has no windows"),
    ("iswa", (K, V), "kind 'iswa': no part has a window"),
    ("dsv4", (K, STATE), "kind 'dsv4': no part has a window"),
    ("kv", (K, V, STATE), "kind 'kv': a part has point state"),
    ("recurrent", (), "kind 'recurrent': no part has point state"),
    ("hybrid", (K, V), "kind 'hybrid': no part has point state"),
    ("kv", (K, V, K), "kind 'kv': two parts of one layer have the same name"),
    ("dsa", (LATENT, replace(INDEX, size=7, basis=Basis.ROTATED)), "idx.k: rows of 7 values cannot be"),
]


@pytest.mark.parametrize(("kind", "parts", "message"), BAD, ids=[message for _, _, message in BAD])
def test_parts_that_make_no_such_kind_are_refused(
    kind: str, parts: tuple[PartNeed, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_memory(replace(member_spec("kv"), needs=MemoryNeeds(kind, parts)))


@pytest.mark.parametrize("kind", ["dsa", "msa", "hybrid_idx", "dsv4"])
def test_rows_that_blocks_do_not_divide_are_refused_by_the_settings_name(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"type_k = 'q8_0': .* 32, not 48"):
        build_memory(member_spec(kind, size=48, types=("q8_0", "f32")))


# -- laws of all kinds -----------------------------------------------------------------------------

TYPES = [("f32", "f32"), ("bf16", "f16"), ("q8_0", "q5_0"), ("q4_0", "q8_0")]
every_type = pytest.mark.parametrize("types", TYPES, ids="-".join)


def story(kind: str, types: tuple[str, str], dtype: torch.dtype) -> list[Seen]:
    """What some passes over forks, cuts and several sequences are given."""
    memory_spec = member_spec(kind, size=64, types=types, dtype=dtype, max_ubatch=24, num_cells=200)
    memory = tiny_memory(memory_spec)
    seen = feed(memory_spec, memory, (A, range(21)), (B, range(300, 306)))
    memory.mark(A)
    for i in range(4):
        seen += feed(memory_spec, memory, (A, [30 + i]), (B, [310 + i]))
    memory.copy(A, C)
    seen += feed(memory_spec, memory, (C, range(400, 411)), (A, range(500, 503)))
    memory.remove(A, memory.last_resumable(A, 22), None)
    memory.remove(B, 0, None)
    for i in range(4):
        seen += feed(memory_spec, memory, (C, [420 + i]), (A, [600 + i]), (B, [700 + i]))
    return seen


def assert_equal_bits(ones: Sequence[Seen], others: Sequence[Seen]) -> None:
    for one, other in zip(ones, others, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.tensors(), other.tensors(), strict=True))


@every_kind
@every_type
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_order_of_cells_does_not_change_a_bit(
    kind: str, types: tuple[str, str], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = story(kind, types, dtype)
    find, random = CellTable.find_slot, np.random.default_rng(7)

    def shuffled(self: CellTable, requests: Sequence[tuple[SeqId, int]]) -> list[Ints]:
        found = find(self, requests)
        pool = random.permutation(np.flatnonzero(self.takeable()))
        counts = np.cumsum([len(cells) for cells in found])
        return np.split(pool[: counts[-1]], counts[:-1])

    monkeypatch.setattr(CellTable, "find_slot", shuffled)
    assert_equal_bits(story(kind, types, dtype), expected)


@every_kind
@every_type
def test_a_restored_sequence_goes_on_with_equal_bits(kind: str, types: tuple[str, str]) -> None:
    for length in (1, 2, 5, 6, 11, 12):
        memory_spec = member_spec(kind, size=64, types=types, dtype=torch.bfloat16, max_ubatch=8)
        memory, other = tiny_memory(memory_spec), tiny_memory(memory_spec)
        feed(memory_spec, memory, (A, range(length)))
        feed(memory_spec, other, (C, range(900, 907)))
        other.restore(B, tuple(range(length)), *memory.snapshot(A))
        for token in range(100, 107):
            live, again = feed(memory_spec, memory, (A, [token])), feed(memory_spec, other, (B, [token]))
            assert_equal_bits(live, again)
        assert_equal_bits(feed(memory_spec, memory, (A, [1, 2, 3])), feed(memory_spec, other, (B, [1, 2, 3])))


@every_kind
def test_what_nobody_owns_does_not_matter_whatever_it_holds(kind: str) -> None:
    memory_spec = member_spec(kind, max_ubatch=8)
    clean, dirty = tiny_memory(memory_spec), tiny_memory(memory_spec)
    for part in dirty._parts.stored:
        part.buffer._data.fill_(float("nan"))
    for tokens in (range(9), range(9, 10), range(10, 16)):
        assert_equal_bits(
            feed(memory_spec, clean, (A, tokens), (B, [50 + tokens[0]])),
            feed(memory_spec, dirty, (A, tokens), (B, [50 + tokens[0]])),
        )
