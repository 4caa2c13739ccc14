"""Rows cut along their heads and put together again are the rows, whatever their dtype."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.cache.memory import MemoryNeeds, MemorySpec, PointSpec, RowsSpec, keys_and_values
from engine.cache.parts_memory import PartsMemory
from engine.cache.table import INDEX, build_memory
from engine.errors import StateError
from engine.parallel.share import Share
from engine.parallel.slices import Slices, local_needs
from engine.state import PartKind, Point, Rows, SeqId, parts_of

LENGTH = 20
#: Three heads of 96 and of 32 values: an odd number of blocks a row, and one a head.
DIVIDED = keys_and_values(0, 3, 96, 32, None)
NEEDS = MemoryNeeds("msa", (*DIVIDED, RowsSpec(INDEX, 0, 1, 64)))


def spec(dtype: str) -> MemorySpec:
    return MemorySpec(NEEDS, 64, 2, 32, 32, dtype, dtype, torch.float32, torch.device("cpu"))


def memories(dtype: str, size: int) -> list[PartsMemory]:
    """Those of each rank."""
    shares = [Share(rank, size) for rank in range(size)]
    return [build_memory(replace(spec(dtype), needs=local_needs(NEEDS, share))) for share in shares]


def rows(dtype: str) -> Rows:
    """Bytes that tell every place in a row from every other one."""
    layout = build_memory(spec(dtype)).layout
    generator = torch.Generator().manual_seed(0)
    shapes = [(LENGTH, part.row_nbytes) for part in parts_of(layout, PartKind.TOKEN)]
    parts = tuple(torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8) for shape in shapes)
    return Rows(PartKind.TOKEN, 0, LENGTH, parts)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8_0", "q4_0"])
def test_every_rank_keeps_its_own_heads(dtype: str, size: int) -> None:
    """A rank's rows go into its memory, come out as they were, and are the whole's beside each other."""
    whole, ranks = rows(dtype), memories(dtype, size)
    slices = Slices.of(ranks[0].layout, NEEDS, size)
    assert slices.layout == build_memory(spec(dtype)).layout
    kept = []
    for rank, memory in enumerate(ranks):
        memory.restore(SeqId(0), tuple(range(LENGTH)), slices.cut([whole], rank), ())
        (run,), _ = memory.snapshot(SeqId(0))
        kept.append(run)
    for index, part in enumerate(parts_of(slices.layout, PartKind.TOKEN)):
        theirs = [run.parts[index] for run in kept]
        if part.name in slices.split:
            assert torch.equal(torch.cat(theirs, 1), whole.parts[index])
        else:
            assert all(torch.equal(mine, whole.parts[index]) for mine in theirs)
    assert slices.split == {"kv.k.00", "kv.v.00"}


def test_four_ranks_of_three_heads_have_a_rank_without_rows() -> None:
    first = memories("q8_0", 4)[0]
    assert [part.row_nbytes for part in first.layout if part.name == "kv.k.00"] == [0]


MISSHAPEN = {
    "a part too few": lambda run: replace(run, parts=run.parts[1:]),
    "a row too few": lambda run: replace(run, parts=(run.parts[0][1:], *run.parts[1:])),
    "a byte too few": lambda run: replace(run, parts=(run.parts[0][:, 1:], *run.parts[1:])),
    "another dtype": lambda run: replace(run, parts=(run.parts[0].char(), *run.parts[1:])),
    "a negative start": lambda run: replace(run, start=-1),
    "an end before the start": lambda run: replace(run, start=4, stop=2),
    "another kind": lambda run: replace(run, kind=PartKind.POINT),
}


@pytest.mark.parametrize("wrong", MISSHAPEN)
def test_what_cannot_be_cut_is_refused(wrong: str) -> None:
    """Before anything is sent: the other ranks could not tell how much to take."""
    slices = Slices.of(memories("f32", 2)[0].layout, NEEDS, 2)
    with pytest.raises(StateError):
        slices.check([MISSHAPEN[wrong](rows("f32"))], ())


def test_point_state_has_the_shape_of_the_layout() -> None:
    needs = MemoryNeeds("recurrent", (PointSpec("ssm.state", 0, (4,)),))
    memory = build_memory(replace(spec("f32"), needs=needs))
    slices = Slices.of(memory.layout, needs, 2)
    slices.check((), [Point(3, (torch.zeros(16, dtype=torch.uint8),))])
    for parts in ((), (torch.zeros(15, dtype=torch.uint8),)):
        with pytest.raises(StateError):
            slices.check((), [Point(3, parts)])
