"""Windows saved small: which window rows of a state are worth writing, and which checkpoints with them."""

from __future__ import annotations

from dataclasses import replace

from engine.state import PartKind, Rows, SequenceState
from serialization.chunks import CHUNK_TOKENS
from serialization.manifest import Manifest
from serialization.resume import max_window, needed_window


def trimmed(state: SequenceState, previous: Manifest | None, untouched: int) -> SequenceState:
    """The state with the window rows alone that going on at its end needs, and those that `previous` has
    stored in chunks that are written anew, so that what could be resumed still can; and without the
    checkpoints that cannot be resumed for want of other window rows.

    Memory holds more of them than that. Rows of the first `untouched` tokens are those that `previous`
    stored.
    """
    wanted = [range(needed_window(state.layout, state.length), state.length)]
    for chunk in previous.chunks if previous is not None else ():
        blob = chunk.blob(PartKind.WINDOW)
        if blob is not None and blob.start < min(untouched, state.length):
            wanted.append(range(blob.start, min(chunk.start + CHUNK_TOKENS, state.length)))
    joined = _joined(wanted)
    rows: list[Rows] = []
    for run in state.rows:
        rows += [run] if run.kind is not PartKind.WINDOW else _cut(run, joined)
    window = max_window(state.layout)
    points = (point for point in state.points if _has(joined, point.position - window, point.position))
    return replace(state, rows=tuple(rows), points=tuple(points))


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
