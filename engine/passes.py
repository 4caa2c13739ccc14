"""One batch through memory and model: planned, computed and committed, or as if it had never been."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from engine.batch import Batch
from engine.cache.memory import Memory, Plan
from engine.models.base import Model
from engine.slots import Slots
from engine.state import SeqId

#: For each sequence, from which position on which tokens go in.
Work = Mapping[SeqId, tuple[int, Sequence[int]]]


def compute(model: Model, memory: Memory, slots: Slots, work: Work) -> dict[SeqId, torch.Tensor]:
    """Logits after the last token of each sequence, float32 [vocab].

    Idle sequences give way where there is no room. Raises NoSlot, BatchRefused; after these, and after
    whatever else goes wrong on the way, the memory is as it was.
    """
    batch = batch_of(work)
    plan: Plan = slots.with_room(lambda: memory.plan(batch))
    found: dict[SeqId, torch.Tensor] = {}
    try:
        with torch.inference_mode():
            for index, ubatch in enumerate(plan.ubatches):
                wanted = np.flatnonzero(ubatch.outputs)
                logits = model.forward(
                    torch.from_numpy(ubatch.tokens),
                    torch.from_numpy(ubatch.positions),
                    plan.apply(index),
                    torch.from_numpy(wanted),
                ).cpu()
                seqs = batch.seqs[ubatch.rows[wanted]]
                found |= {SeqId(int(seq)): row for seq, row in zip(seqs, logits, strict=True)}
    except BaseException:
        plan.rollback()
        raise
    plan.commit()
    return found


def batch_of(work: Work) -> Batch:
    """All tokens of `work`, sequence after sequence; logits are wanted after the last of each."""
    counts = [len(tokens) for _, tokens in work.values()]
    outputs = np.zeros(sum(counts), dtype=np.bool_)
    outputs[np.cumsum(counts) - 1] = True
    return Batch(
        tokens=np.concatenate([np.asarray(tokens, dtype=np.int64) for _, tokens in work.values()]),
        positions=np.concatenate(
            [np.arange(start, start + len(tokens), dtype=np.int64) for start, tokens in work.values()]
        ),
        seqs=np.repeat(np.fromiter(work, dtype=np.int64), counts),
        outputs=outputs,
    )
