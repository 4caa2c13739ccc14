"""The engine's own record of a sequence: its ids, what follows them, and how its rows came to be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from engine.state import (
    Canary,
    Edge,
    NextLogits,
    Pending,
    Provenance,
    SamplerParams,
    SequenceState,
    Span,
)

#: How many of the largest logits are kept as a canary.
CANARY_LOGITS = 16


@dataclass(slots=True)
class Record:
    """`tokens` are fed; `recent` (float32 [n, vocab]) are the logits after each of the last n of them, where
    they are known.

    `canary` is that of a restored state, until tokens follow. Rows are shared within one `scope` alone.
    """

    sampler: SamplerParams
    tokens: list[int] = field(default_factory=list)
    spans: tuple[Span, ...] = ()
    edge: Edge = None
    recent: torch.Tensor | None = None
    canary: Canary | None = None
    scope: str = ""

    @classmethod
    def of(cls, state: SequenceState, scope: str = "") -> Record:
        # Without a canary the logits are older than the rows: a shift came between.
        fresh = state.edge.logits[None] if isinstance(state.edge, NextLogits) and state.canary else None
        return cls(state.sampler, list(state.tokens), state.spans, state.edge, fresh, state.canary, scope)

    @property
    def logits(self) -> torch.Tensor | None:
        """float32 [vocab] after the last fed token, where they are known."""
        return None if self.recent is None else self.recent[-1]

    def follow(self, recent: torch.Tensor) -> None:
        """`recent` were just computed, and nothing is chosen yet."""
        self.recent, self.edge = recent, NextLogits(recent[-1])

    def known_canary(self) -> Canary | None:
        if self.logits is None:
            return self.canary
        top = torch.topk(self.logits, min(CANARY_LOGITS, self.logits.numel()))
        return Canary(len(self.tokens) - 1, tuple(top.indices.tolist()), tuple(top.values.tolist()))

    def append(self, tokens: Sequence[int]) -> None:
        """Tokens whose rows were just computed."""
        start = len(self.tokens)
        self.recent = self.canary = None
        self.tokens.extend(tokens)
        self.spans = joined((*self.spans, Span(start, len(self.tokens), Provenance.COMPUTED)))

    def cut(self, length: int) -> None:
        """Only the first `length` tokens are left; the one that followed is pending."""
        followed, gone = self.tokens[length], len(self.tokens) - length
        del self.tokens[length:]
        self.spans = spans_below(self.spans, length)
        self.edge = Pending(followed) if length else None
        left = 0 if self.recent is None else len(self.recent) - gone
        self.recent = self.recent[:left] if self.recent is not None and left > 0 else None
        self.canary = None

    def drop(self, start: int, stop: int) -> None:
        """Tokens [start, stop) are gone, and those behind them moved up.

        What follows stays as it is, but the rows would no longer give these very logits.
        """
        del self.tokens[start:stop]
        self.recent = self.canary = None
        moved = Span(start, len(self.tokens), Provenance.SHIFTED)
        self.spans = joined((*spans_below(self.spans, start), moved))

    def fork(self) -> Record:
        return replace(self, tokens=list(self.tokens))

    def shareable(self, tokens: Sequence[int]) -> int:
        """How many leading `tokens` this sequence has computed rows of."""
        computed = 0
        for span in self.spans:
            if span.provenance is not Provenance.COMPUTED:
                break
            computed = span.stop
        count = min(computed, len(tokens))
        differ = np.flatnonzero(np.asarray(self.tokens[:count]) != np.asarray(tokens[:count]))
        return int(differ[0]) if len(differ) else count


def spans_below(spans: Sequence[Span], length: int) -> tuple[Span, ...]:
    return tuple(
        Span(span.start, min(span.stop, length), span.provenance) for span in spans if span.start < length
    )


def joined(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Neighbours of one provenance made one; empty ones left out."""
    out: list[Span] = []
    for span in spans:
        if span.start == span.stop:
            continue
        if out and out[-1].provenance is span.provenance and out[-1].stop == span.start:
            out[-1] = Span(out[-1].start, span.stop, span.provenance)
        else:
            out.append(span)
    return tuple(out)
