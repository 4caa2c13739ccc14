"""Does the model that was named compute these rows? The last tokens are fed again, and compared layer by
layer.

A foreign state says nothing of the model that made it. Where its rows are put under the model's own, and the
last few tokens are computed from them once more, the right model comes to what the file has for those
tokens, but for the last bits of other kernels; any other one does not. How far both are apart was measured
(docs/foreign.md), and the limit lies between.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.cache.memory import RowsSpec, WindowSpec
from engine.errors import EngineError, Unproven
from engine.state import (
    NextLogits,
    PartKind,
    PartSpec,
    Pending,
    Provenance,
    Rows,
    SamplerParams,
    SeqId,
    SequenceState,
    Span,
    parts_of,
)
from engine.verbs import Verbs
from serialization.foreign.convert import Converted
from serialization.foreign.forms import values_of
from serialization.foreign.geometry import Geometry
from serialization.foreign.target import Target, own_form

#: tokens that are computed again, where the windows of the file reach back so far
PROOF_ROWS = 8
#: The largest relative drift of a layer's keys or values that other kernels have, and the rounding of dtypes
#: that rows went through. Right models were within two thirds of it, and the least wrong ones beyond it by a
#: half (docs/foreign.md has the figures).
LIMIT = 0.2
LIMITS: Mapping[str, float] = {"q5_0": 0.24, "q4_0": 0.32}


@dataclass(frozen=True, slots=True)
class LayerDrift:
    """How far the rows of a part are from what was computed: the norm of all differences over that of the
    rows."""

    part: str
    layer: int
    drift: float

    @property
    def apart(self) -> float:
        """The same for comparing: what is no number is further away than any."""
        return math.inf if math.isnan(self.drift) else self.drift


@dataclass(frozen=True, slots=True)
class Proof:
    """The last `num_rows` tokens were computed again. `logits` follow the last one (float32 [vocab]).
    `limit` is the largest drift that is none of another model."""

    num_rows: int
    limit: float
    layers: tuple[LayerDrift, ...]
    logits: torch.Tensor

    @property
    def worst(self) -> LayerDrift:
        """The layer that is furthest away, or is no number."""
        return max(self.layers, key=lambda each: each.apart)

    @property
    def proven(self) -> bool:
        return self.worst.drift <= self.limit

    def require(self, model: str) -> None:
        """Raises Unproven, which names the layer."""
        if not self.proven:
            worst = self.worst
            raise Unproven(
                f"{model} does not compute these rows: of the last {self.num_rows} tokens {worst.part} is off"
                f" by {worst.drift:.2f} of its size, and other kernels are by no more than {self.limit:g}",
                part=worst.part,
                layer=worst.layer,
                drift=worst.drift,
            )


def prove(engine: Verbs, geometry: Geometry, target: Target, rows: Converted, tokens: Sequence[int]) -> Proof:
    """Compute the last of the `rows.length` tokens again on rows of the file before them, and compare.
    Nothing stays in the engine. Raises Unproven where not even the last one can be computed again,
    ContextFull, NoSlot."""
    length = rows.length
    start = _start(engine, rows)
    seq = engine.create() if start == 0 else engine.restore(past(engine, rows, tokens, start))
    try:
        engine.feed(seq, tokens[start:length])
        edge = engine.edge(seq)
        if not isinstance(edge, NextLogits):
            raise EngineError("a sequence that was fed has no logits")
        anew = engine.snapshot(seq, start)
    finally:
        let_go(engine, seq)
    drifts = []
    for spec in target.layout:
        mine, theirs = _last(anew.rows, target, spec, start), _last(rows.rows, target, spec, start)
        form = own_form(spec, geometry, target)
        a, b = values_of(theirs, form).double(), values_of(mine, form).double()
        size = float(b.norm())
        drifts.append(LayerDrift(spec.name, spec.layer, float((a - b).norm()) / size if size else math.inf))
    limit = max(LIMITS.get(dtype, LIMIT) for dtype in {*rows.dtypes, *(spec.dtype for spec in target.layout)})
    return Proof(length - start, limit, tuple(drifts), edge.logits)


def past(engine: Verbs, rows: Converted, tokens: Sequence[int], length: int) -> SequenceState:
    """The first `length` tokens of imported rows, followed by the next one. A window row that memory asks
    for, but that nothing from here on sees, is zeros where the file has it not."""
    cut = []
    for run in rows.rows:
        start, parts = run.start, run.parts
        if run.kind is PartKind.WINDOW:
            specs = parts_of(engine.remembered.layout, PartKind.WINDOW)
            needed = max(0, length - max(spec.window or 0 for spec in specs))
            if start > needed:
                parts = tuple(
                    torch.cat((part.new_zeros((start - needed, part.shape[1])), part)) for part in parts
                )
                start = needed
        cut.append(Rows(run.kind, start, length, tuple(part[: length - start] for part in parts)))
    return SequenceState(
        layout=engine.remembered.layout,
        fingerprint=engine.fingerprint,
        tokens=tuple(tokens[:length]),
        rows=tuple(cut),
        points=(),
        spans=(Span(0, length, Provenance.IMPORTED),),
        edge=Pending(tokens[length]),
        sampler=SamplerParams(),
    )


def let_go(engine: Verbs, seq: SeqId) -> None:
    """Closed with its rows it would be a past that others are read by, and that past is in question."""
    engine.rewind(seq, 0)
    engine.close(seq)


def provable(engine: Verbs, rows: Converted) -> bool:
    """Whether the file has the rows that its last token sees."""
    try:
        _start(engine, rows)
    except Unproven:
        return False
    return True


def _start(engine: Verbs, rows: Converted) -> int:
    """From where on tokens are computed again: as many as are wanted, but none that would see a row that the
    file has not."""
    windows = [
        need.window
        for need in engine.remembered.needs.parts
        if isinstance(need, RowsSpec) and need.window is not None
    ]
    for start in range(max(0, rows.length - PROOF_ROWS), rows.length):
        if all(_first_visible(window, start) >= rows.window_start for window in windows):
            return start
    raise Unproven("the file has fewer window rows than its last token sees, so nothing can prove it")


def _first_visible(window: WindowSpec, position: int) -> int:
    return position // window.size * window.size if window.chunked else max(0, position - window.size + 1)


def _last(rows: Sequence[Rows], target: Target, spec: PartSpec, start: int) -> torch.Tensor:
    index = parts_of(target.layout, spec.kind).index(spec)
    return torch.cat(
        [
            run.parts[index][max(0, start - run.start) :].cpu()
            for run in rows
            if run.kind is spec.kind and run.stop > start
        ]
    )
