"""A copy on the device never passes through the host: counted, and shown on a device that nothing can leave.

torch's meta device has tensors without values. What would bring a value of theirs to the host raises, so a
memory that lives there shows on any machine where rows go.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from engine.cache.parts_memory import PartsMemory
from engine.cache.table import build_memory
from engine.passes import batch_of
from engine.runner import Engine
from engine.slots import memory_spec
from engine.state import SeqId
from tests.engine.conftest import MakeEngine
from tests.engine.pictures import begun, bits
from tests.engine.transfers import Transfers
from tests.exact.members import MEMBERS, open_member

PAST = [(7 * i) % 250 for i in range(90)]
META = torch.device("meta")


def moved_to_meta(engine: Engine) -> PartsMemory:
    """The engine with a memory on the meta device. Its model is not to be asked."""
    spec = dataclasses.replace(memory_spec(engine._model.needs, engine.config), device=META)
    memory = build_memory(spec)
    engine._memory = engine._core.memory = engine._slots._memory = memory
    return memory


def occupy(engine: Engine, memory: PartsMemory, seq: SeqId, count: int) -> None:
    """Tokens in cells, as if a model had been run."""
    record = engine._slots[seq]
    for start in range(len(record.tokens), len(record.tokens) + count, 5):
        tokens = PAST[start : min(start + 5, len(record.tokens) + count)]
        plan = memory.plan(batch_of({seq: (start, tokens)}))
        for index, _ in enumerate(plan.ubatches):
            plan.apply(index)
        plan.commit()
        record.append(tokens)
        record.follow(torch.zeros(1, 260))
        memory.mark(seq)


@pytest.mark.parametrize("family", MEMBERS)
def test_no_byte_of_a_copy_comes_to_the_host(family: str) -> None:
    engine = open_member(family, MEMBERS[family].dtypes[-1])
    memory = moved_to_meta(engine)
    seq, other = engine.create(), engine.create()
    for count in (25, 10, 30):  # in turns, so that cells are in pieces
        occupy(engine, memory, seq, count)
        occupy(engine, memory, other, 5)
    with Transfers() as transfers:
        handle = engine.device_snapshot(seq)
        engine.device_restore(handle, other)
        engine.device_restore(handle, seq)
        engine.device_restore(handle)
        engine.device_free(handle)
    assert transfers.to_host == 0
    assert handle.nbytes > 0
    # Where cells are is known on the host: indices are all that goes the other way.
    cells = 8 * sum(table.num_cells for table, _ in memory._tables)
    parts = len(engine.layout)
    assert transfers.to_device <= 4 * parts * cells


def test_a_snapshot_for_a_store_would_be_seen_on_its_way() -> None:
    engine = open_member("llama", "q8_0")
    memory = moved_to_meta(engine)
    seq = engine.create()
    occupy(engine, memory, seq, 30)
    state = engine.snapshot(seq)
    with pytest.raises(NotImplementedError):
        state.rows[0].parts[0].cpu()


def test_what_crosses_is_counted() -> None:
    far = torch.zeros((6, 4), device=META)
    with Transfers() as transfers:
        torch.zeros_like(far, device="cpu")
        far + 1
        far.clone()
    assert (transfers.to_host, transfers.to_device) == (96, 0)
    with Transfers() as transfers:
        far.index_copy_(0, torch.from_numpy(np.arange(3)).to(META), far[:3])
    assert (transfers.to_host, transfers.to_device) == (0, 24)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA GPU on this machine")
@pytest.mark.parametrize("dtype", ["bf16", "q8_0"])
def test_on_a_gpu_a_copy_stays_there(dtype: str, make_engine: MakeEngine) -> None:
    engine = make_engine(device="cuda", type_k=dtype, type_v=dtype)
    seq, other = begun(engine, PAST), begun(engine, PAST[::-1])
    engine.feed(seq, PAST[:20])
    allocated = torch.cuda.memory_allocated()
    with Transfers() as copying:
        handle = engine.device_snapshot(seq)
    assert torch.cuda.memory_allocated() - allocated >= handle.nbytes
    live = bits(engine, seq, 10)
    with Transfers() as restoring:
        engine.device_restore(handle, other)
        again = engine.device_restore(handle)
    assert copying.to_host == restoring.to_host == 0
    assert bits(engine, other, 10) == live == bits(engine, again, 10)
    with Transfers() as storing:
        for run in engine.snapshot(seq).rows:
            for part in run.parts:
                part.cpu()
    assert storing.to_host > 0
