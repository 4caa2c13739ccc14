"""One batch through memory and model: planned, computed and committed, or as if it had never been."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.batch import Batch, Ints
from engine.cache.memory import Memory, Plan
from engine.models.base import Model, Trunk
from engine.placing import run_pass
from engine.slots import Slots
from engine.state import SeqId

#: For each sequence, from which position on which tokens go in.
Work = Mapping[SeqId, tuple[int, Sequence[int]]]


@dataclass(frozen=True, slots=True)
class Computed:
    """What a batch gave, by sequence: float32 `logits` [rows, vocab], and of every token the `hidden` state
    float32 [tokens, width] that logits are made from, where it was asked for."""

    logits: dict[SeqId, torch.Tensor]
    hidden: dict[SeqId, torch.Tensor]


def compute(
    model: Model,
    memory: Memory,
    slots: Slots,
    work: Work,
    every: Collection[SeqId] = (),
    trunk: Trunk | None = None,
) -> Computed:
    """Logits after the last token of each sequence, and after each token of those in `every`. `trunk` is the
    model again, where its hidden states are asked for.

    Idle sequences give way where there is no room. Raises NoSlot, BatchRefused; after these, and after
    whatever else goes wrong on the way, the memory is as it was.
    """
    batch = batch_of(work, every)
    plan: Plan = slots.with_room(lambda: memory.plan(batch))
    logits: list[torch.Tensor] = []
    hidden: list[torch.Tensor] = []
    wanted: list[Ints] = []
    try:
        with torch.inference_mode():
            for index, ubatch in enumerate(plan.ubatches):
                found, states = run_pass(model, trunk, ubatch, plan.apply(index))
                if states is not None:
                    hidden.append(states)
                logits.append(found.cpu())
                wanted.append(ubatch.rows[ubatch.outputs])
    except BaseException:
        plan.rollback()
        raise
    plan.commit()
    in_batch = [ubatch.rows for ubatch in plan.ubatches]
    return Computed(_by_seq(batch, wanted, logits), _by_seq(batch, in_batch, hidden))


def _by_seq(batch: Batch, rows: list[Ints], values: list[torch.Tensor]) -> dict[SeqId, torch.Tensor]:
    """`values`, one for each of `rows` of the batch, put in its order and divided among its sequences."""
    if not values:
        return {}
    at = np.concatenate(rows)
    order = np.argsort(at, kind="stable")
    joined = values[0] if len(values) == 1 else torch.cat(values)
    if bool((np.diff(order) != 1).any()):
        joined = joined[torch.from_numpy(order).to(joined.device)]
    seqs = batch.seqs[at[order]]
    return {SeqId(int(seq)): joined[_run(seqs, seq)] for seq in np.unique(seqs)}


def _run(seqs: Ints, seq: int) -> slice:
    """Where `seq` is; a batch has its sequences one after the other."""
    found = np.flatnonzero(seqs == seq)
    return slice(int(found[0]), int(found[-1]) + 1)


def batch_of(work: Work, every: Collection[SeqId] = ()) -> Batch:
    """All tokens of `work`, sequence after sequence; logits are wanted after the last of each, and after each
    of those in `every`."""
    counts = [len(tokens) for _, tokens in work.values()]
    outputs = np.repeat(np.array([seq in every for seq in work], dtype=np.bool_), counts)
    outputs[np.cumsum(counts) - 1] = True
    return Batch(
        tokens=np.concatenate([np.asarray(tokens, dtype=np.int64) for _, tokens in work.values()]),
        positions=np.concatenate(
            [np.arange(start, start + len(tokens), dtype=np.int64) for start, tokens in work.values()]
        ),
        seqs=np.repeat(np.fromiter(work, dtype=np.int64), counts),
        outputs=outputs,
    )
