"""Logits at every position, which the engine itself never needs: it asks for those after the last token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from engine.batch import Batch
from engine.runner import Engine
from engine.state import SeqId


def read_all(
    engine: Engine, tokens: Sequence[int], chunks: Sequence[int]
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Feed `tokens` to a new sequence, one plan for each of `chunks` (token counts that add up).

    Yields, for every ubatch, which positions they are and their logits [positions, vocab].
    """
    assert sum(chunks) == len(tokens)
    seq, start = engine.create(), 0
    for count in chunks:
        plan = engine._memory.plan(_batch(seq, start, tokens[start : start + count]))
        try:
            for index, ubatch in enumerate(plan.ubatches):
                with torch.inference_mode():
                    logits = engine._model.forward(
                        torch.from_numpy(ubatch.tokens),
                        torch.from_numpy(ubatch.positions),
                        plan.apply(index),
                        torch.arange(len(ubatch)),
                    )
                yield slice(start, start + len(ubatch)), logits
                start += len(ubatch)
        finally:  # also where the reader stops in the middle, so that the engine serves the next test
            plan.commit()
    engine._slots.discard(seq)


def _batch(seq: SeqId, start: int, tokens: Sequence[int]) -> Batch:
    count = len(tokens)
    return Batch(
        tokens=np.asarray(tokens, dtype=np.int64),
        positions=np.arange(start, start + count, dtype=np.int64),
        seqs=np.full(count, seq, dtype=np.int64),
        outputs=np.ones(count, dtype=np.bool_),
    )
