"""The canary of a state: its last token computed again, before rows of another build are believed."""

from __future__ import annotations

import torch

from engine.cache.memory import Memory
from engine.errors import EditRefused
from engine.models.base import Model
from engine.passes import compute
from engine.slots import Slots
from engine.state import Canary, SeqId


def canary_drift(
    model: Model, memory: Memory, slots: Slots, seq: SeqId, canary: Canary, reach: int, max_batch: int
) -> float:
    """The largest |difference| between `canary` and the logits that this engine computes there.

    It reads from the last position before the end that the sequence could go on from: the last token
    alone, or where there is point state the tokens since a checkpoint, `reach` of them at most beside it.
    The sequence stays as it is. Raises EditRefused, NoSlot.
    """
    tokens = slots[seq].tokens
    if canary.position != len(tokens) - 1:
        raise EditRefused(f"the canary is of position {canary.position}, not of the last token")
    start = memory.last_resumable(seq, len(tokens) - 1)
    if len(tokens) - 1 - start > reach:
        raise EditRefused(f"the canary could only be computed from position {start:,} on")
    aside = slots.scratch()
    try:
        memory.copy(seq, aside, 0, start)
        for at in range(start, len(tokens), max_batch):
            found = compute(model, memory, slots, {aside: (at, tokens[at : at + max_batch])})
    finally:
        slots.discard(aside)
    expected = torch.tensor(canary.logits, dtype=torch.float32)
    return float((found.logits[aside][-1, list(canary.ids)] - expected).abs().max())
