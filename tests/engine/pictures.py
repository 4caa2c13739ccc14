"""All that an engine says of a sequence, in a form that can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.runner import Engine
from engine.state import NextLogits, SeqId


def picture(engine: Engine, seq: SeqId) -> dict[str, Any]:
    """Ids, edge, spans, and every byte of the rows."""
    state = engine.snapshot(seq)
    edge = state.edge
    return {
        "tokens": state.tokens,
        "edge": edge.logits.tolist() if isinstance(edge, NextLogits) else edge,
        "spans": state.spans,
        "sampler": state.sampler,
        "rows": [
            (rows.kind, rows.start, rows.stop, [part.tolist() for part in rows.parts]) for rows in state.rows
        ],
    }


def begun(engine: Engine, text: str | Sequence[int], *, steps: int = 0) -> SeqId:
    """A new sequence with `text` fed and `steps` tokens decoded."""
    seq = engine.create()
    engine.feed(seq, engine.tokenizer.encode(text) if isinstance(text, str) else list(text))
    for _ in range(steps):
        engine.decode([seq])
    return seq


def said(engine: Engine, seq: SeqId, count: int) -> list[int]:
    """The next `count` tokens."""
    return [engine.decode([seq])[seq] for _ in range(count)]


def bits(engine: Engine, seq: SeqId, count: int) -> list[list[float]]:
    """The logits after each of the next `count` tokens."""
    found = []
    for _ in range(count):
        engine.decode([seq])
        logits = engine.logits(seq)
        assert logits is not None
        found.append(logits.tolist())
    return found
