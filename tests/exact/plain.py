"""What sequences are made of, kept in plain lists: a reference that drops what is rejected, and never goes
back.

Every batch is computed from scratch: what its sequences have is restored into an engine that forgets it
afterwards. The rows of the batch are put behind those there were, and point state is taken where the layers
hand it over, so that no trail and no checkpoint has a part in it. To be cut is to have fewer items.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import torch

from engine.cache.view import PartsView
from engine.runner import Engine
from engine.state import (
    Layout,
    PartKind,
    Pending,
    Point,
    Rows,
    SamplerParams,
    SeqId,
    SequenceState,
    Span,
    parts_of,
)
from tests.exact.running import forget

Bytes = tuple[torch.Tensor, ...]


@dataclass
class Line:
    """A sequence: its tokens, the rows of every part of each kind, uint8 [n, row_nbytes] from the first token
    on, and the point state after each of some first tokens."""

    layout: Layout
    tokens: list[int] = field(default_factory=list)
    rows: dict[PartKind, Bytes] = field(default_factory=dict)
    points: dict[int, Bytes] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def has_points(self) -> bool:
        return bool(parts_of(self.layout, PartKind.POINT))

    @property
    def window(self) -> int | None:
        """Rows that going on needs, of those that have a window."""
        sizes = [spec.window for spec in self.layout if spec.window is not None]
        return max(sizes, default=None)

    def at(self, length: int) -> Line:
        """What is left of it when all behind its first `length` tokens is dropped."""
        rows = {
            kind: tuple(
                part[: spec.num_rows(0, length)]
                for spec, part in zip(parts_of(self.layout, kind), parts, strict=True)
            )
            for kind, parts in self.rows.items()
        }
        points = {at: kept for at, kept in self.points.items() if at <= length}
        return Line(self.layout, self.tokens[:length], rows, points)

    def append(self, tokens: Sequence[int], rows: Sequence[Rows], points: dict[int, Bytes]) -> None:
        self.tokens += tokens
        for run in rows:
            before = self.rows.get(run.kind, tuple(part[:0] for part in run.parts))
            pairs = zip(before, run.parts, strict=True)
            self.rows[run.kind] = tuple(torch.cat((early, late)) for early, late in pairs)
        self.points |= points

    def state(self, engine: Engine) -> SequenceState:
        length = len(self)
        points = (Point(length, self.points[length]),) if self.has_points else ()
        return SequenceState(
            layout=self.layout,
            fingerprint=engine.fingerprint,
            tokens=tuple(self.tokens),
            rows=tuple(Rows(kind, 0, length, parts) for kind, parts in self.rows.items()),
            points=points,
            spans=(Span(0, length, "computed"),),
            edge=Pending(0),
            sampler=SamplerParams(),
        )


def compute(engine: Engine, work: Sequence[tuple[Line, Sequence[int]]]) -> None:
    """One batch: every line gets its tokens. The engine is left as it was."""
    seqs = [engine.restore(line.state(engine)) if line.tokens else engine.create() for line, _ in work]
    batch = {seq: tokens for seq, (_, tokens) in zip(seqs, work, strict=True)}
    with handed_over() as states:
        engine.advance(batch)
    for seq, (line, tokens) in zip(seqs, work, strict=True):
        names = [spec.name for spec in parts_of(line.layout, PartKind.POINT)]
        points = {
            at: tuple(of_parts[name] for name in names) for (of, at), of_parts in states.items() if of == seq
        }
        line.append(tokens, engine.snapshot(seq, len(line)).rows, points)
        forget(engine, seq)


#: Bytes of each part by its name in the layout, of a sequence at a position.
States = dict[tuple[SeqId, int], dict[str, torch.Tensor]]


@contextmanager
def handed_over() -> Iterator[States]:
    """All point state that layers give to the view."""
    states: States = {}
    original = PartsView.set_point

    def set_point(view: PartsView, name: str, layer: int, given: torch.Tensor) -> None:
        for index, segment in enumerate(view.segments):
            end = int(view.positions[segment.stop - 1]) + 1
            for back in range(given.shape[1]):
                of_parts = states.setdefault((segment.seq, end - back), {})
                row = given[index, given.shape[1] - 1 - back].clone(memory_format=torch.contiguous_format)
                of_parts[f"{name}.{layer:02}"] = row.view(-1).view(torch.uint8)
        original(view, name, layer, given)

    with patch.object(PartsView, "set_point", set_point):
        yield states


def check_rows(state: SequenceState, line: Line) -> None:
    """That a state has the rows of `line`, bit for bit: all of them, or the last ones of windows, as many as
    going on needs."""
    length = len(line)
    assert state.tokens == tuple(line.tokens)
    assert {run.kind for run in state.rows} == (set(line.rows) if length else set())
    for run in state.rows:
        assert run.stop == length
        assert run.start <= (max(0, length - (line.window or 0)) if run.kind is PartKind.WINDOW else 0)
        for spec, mine, theirs in zip(
            parts_of(line.layout, run.kind), run.parts, line.rows[run.kind], strict=True
        ):
            assert torch.equal(mine, theirs[spec.num_rows(0, run.start) :]), (spec.name, length)


def check_points(state: SequenceState, line: Line, marks: set[int]) -> None:
    """That a state has the point state of `line` at its end and at `marks`, bit for bit."""
    wanted = sorted({*marks, len(line)}) if line.has_points and line.tokens else []
    assert [point.position for point in state.points] == wanted
    specs = parts_of(line.layout, PartKind.POINT)
    for point in state.points:
        for spec, mine, theirs in zip(specs, point.parts, line.points[point.position], strict=True):
            assert torch.equal(mine, theirs), (spec.name, point.position)
