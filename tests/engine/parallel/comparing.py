"""States and logits of different ranks, compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.runner import Engine
from engine.state import SeqId, SequenceState


def told(engine: Engine, seq: SeqId, tokens: Sequence[int]) -> list[torch.Tensor]:
    """Logits after each of `tokens`, fed one by one."""
    out = []
    for token in tokens:
        engine.advance({seq: (token,)})
        out.append(logits_after(engine, seq))
    return out


def logits_after(engine: Engine, seq: SeqId) -> torch.Tensor:
    logits = engine.logits(seq)
    assert logits is not None
    return logits.clone()


def drift(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference, as a share of the largest logit."""
    return float((mine - theirs).abs().max() / theirs.abs().max())


def same_bytes(mine: SequenceState, theirs: SequenceState) -> bool:
    """Whether rows and point state are the same, byte for byte."""
    pairs = [
        (a, b)
        for some, others in ((mine.rows, theirs.rows), (mine.points, theirs.points))
        for one, other in zip(some, others, strict=True)
        for a, b in zip(one.parts, other.parts, strict=True)
    ]
    return all(torch.equal(a, b) for a, b in pairs)
