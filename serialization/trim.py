"""Windows saved small: which window rows of a state are worth writing, and which checkpoints with them."""

from __future__ import annotations

from dataclasses import replace

from engine.state import DraftState, PartKind, Point, Rows, SequenceState
from serialization.manifest import Manifest
from serialization.refs import Stored, chunk_floor
from serialization.resume import max_window, needed_window


def trimmed(
    state: SequenceState, previous: Manifest | None, untouched: int, draft_untouched: int = 0
) -> SequenceState:
    """The state with the window rows alone that going on at its end needs, and those that `previous` has
    stored in chunks that are written anew, so that what could be resumed still can; and without the
    checkpoints that cannot be resumed for want of other window rows. Its draft likewise.

    Memory holds more of them than that. Rows of the first `untouched` tokens are those that `previous`
    stored, of the draft those of the first `draft_untouched`.
    """
    rows, points = _trimmed(state, state.length, previous, untouched)
    draft = state.draft
    if draft is not None:
        stored = None if previous is None else previous.draft
        kept_rows, kept_points = _trimmed(draft, draft.length, stored, draft_untouched - draft.ahead)
        draft = replace(draft, rows=kept_rows, points=kept_points)
    return replace(state, rows=rows, points=points, draft=draft)


def _trimmed(
    state: SequenceState | DraftState, length: int, previous: Stored | None, untouched: int
) -> tuple[tuple[Rows, ...], tuple[Point, ...]]:
    wanted = [range(needed_window(state.layout, length), length)]
    if previous is not None:
        for chunk in previous.chunks:
            blob = chunk.blob(PartKind.WINDOW)
            if blob is not None and blob.start < min(untouched, length):
                ends = chunk_floor(chunk.start, previous.chunk_tokens) + previous.chunk_tokens
                wanted.append(range(blob.start, min(ends, length)))
    joined = _joined(wanted)
    rows: list[Rows] = []
    for run in state.rows:
        rows += [run] if run.kind is not PartKind.WINDOW else _cut(run, joined)
    window = max_window(state.layout)
    points = (point for point in state.points if _has(joined, point.position - window, point.position))
    return tuple(rows), tuple(points)


def _has(ranges: list[range], start: int, stop: int) -> bool:
    """Whether one of `ranges` has all tokens [start, stop) that there are."""
    return start >= stop or any(one.start <= max(start, 0) and stop <= one.stop for one in ranges)


def _joined(ranges: list[range]) -> list[range]:
    """The same tokens as disjoint ranges, rising."""
    out: list[range] = []
    for each in sorted(ranges, key=lambda one: one.start):
        if out and each.start <= out[-1].stop:
            out[-1] = range(out[-1].start, max(out[-1].stop, each.stop))
        elif each:
            out.append(each)
    return out


def _cut(run: Rows, wanted: list[range]) -> list[Rows]:
    """The rows of a run that are wanted, as views."""
    out = []
    for each in wanted:
        start, stop = max(run.start, each.start), min(run.stop, each.stop)
        if start < stop:
            parts = tuple(part[start - run.start : stop - run.start] for part in run.parts)
            out.append(Rows(run.kind, start, stop, parts))
    return out
