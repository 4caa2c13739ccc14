"""Where a manifest can be resumed, and which of its chunks a next one may keep: pure functions.

They speak of what a manifest names. Whether the blobs are still there, only a read can tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from engine.errors import NoCheckpoint
from engine.state import DraftState, Layout, PartKind, Pending, Span, parts_of
from serialization.chunks import rows_nbytes
from serialization.drafts import StoredDraft
from serialization.manifest import Manifest
from serialization.refs import ChunkRef, Stored, chunk_floor

#: So many pieces at most make a chunk that is not whole yet: each is a blob or two to be put and fetched.
MAX_PIECES = 8


def resumable_lengths(stored: Stored) -> tuple[range, ...]:
    """Every length that a stored state can go on from, as disjoint ranges, rising.

    0 is always among them. See docs/format.md, section 9.
    """
    most = min(stored.length, _covered(stored.layout, stored.chunks))
    ranges = [range(first, min(last, most) + 1) for first, last in _window_ranges(stored)]
    if parts_of(stored.layout, PartKind.POINT):
        points = [checkpoint.position for checkpoint in stored.checkpoints]
        ranges = [range(point, point + 1) for point in points if any(point in each for each in ranges)]
    ranges = [each for each in ranges if each]
    return tuple(ranges) if any(0 in each for each in ranges) else (range(0, 1), *ranges)


def can_resume_at(stored: Stored, length: int) -> bool:
    """Whether the state, cut to its first `length` tokens, could go on exactly."""
    return any(length in each for each in resumable_lengths(stored))


def last_resumable(stored: Stored, at_most: int) -> int:
    """The largest length of at most `at_most` that can be resumed; 0 if there is no other."""
    return max(min(each[-1], at_most) for each in resumable_lengths(stored) if each[0] <= at_most)


def next_resumable(stored: Stored, at_least: int) -> int | None:
    """The smallest length of at least `at_least` that can be resumed, None where there is none."""
    return next((max(each[0], at_least) for each in resumable_lengths(stored) if each[-1] >= at_least), None)


def cut(manifest: Manifest, length: int) -> Manifest:
    """The manifest of the first `length` tokens; names, times and generation stay as they are.

    No blob is written: the last chunk may hold more rows than there are tokens. The token that followed is
    pending, so that going on says the same again. Messages that end beyond are left out; of the draft
    `draft_within` is left. Raises NoCheckpoint where the state could not go on.
    """
    if length == manifest.length:
        return manifest
    require_resumable(manifest, length)
    return replace(
        manifest,
        tokens=manifest.tokens[:length],
        messages=tuple(message for message in manifest.messages if message.stop <= length),
        spans=spans_within(manifest.spans, 0, length),
        chunks=tuple(chunk for chunk in manifest.chunks if chunk.start < length),
        checkpoints=tuple(each for each in manifest.checkpoints if each.position <= length),
        edge=Pending(manifest.tokens[length]) if length else None,
        canary=None,
        draft=draft_within(manifest.draft, length),
    )


def draft_within(draft: StoredDraft | None, length: int) -> StoredDraft | None:
    """The draft of at most the first `length` tokens: of as many as its own memory can be cut to, since a
    drafter reads the rest by itself. None where that is none of them."""
    if draft is None or length <= draft.ahead:
        return None
    at = last_resumable(draft, min(length - draft.ahead, draft.length))
    if at == 0:
        return None
    return replace(
        draft,
        length=at,
        chunks=tuple(chunk for chunk in draft.chunks if chunk.start < at),
        checkpoints=tuple(each for each in draft.checkpoints if each.position <= at),
    )


def require_resumable(manifest: Manifest, length: int) -> None:
    """Raises NoCheckpoint, with the nearest lengths below and above, unless `length` can be resumed."""
    if not can_resume_at(manifest, length):
        nearest = last_resumable(manifest, max(0, length))
        above = next_resumable(manifest, length)
        behind = "" if above is None else f", the nearest behind is {above:,}"
        raise NoCheckpoint(
            f"the session cannot be resumed at {length:,} tokens; the nearest before is {nearest:,}{behind}",
            length=length,
            nearest=nearest,
            above=above,
        )


def spans_within(spans: Sequence[Span], start: int, stop: int) -> tuple[Span, ...]:
    """The spans of tokens [start, stop), cut to it."""
    return tuple(
        Span(max(span.start, start), min(span.stop, stop), span.provenance)
        for span in spans
        if max(span.start, start) < min(span.stop, stop)
    )


def kept_chunks(
    previous: Manifest | None, tokens: tuple[int, ...], spans: Sequence[Span], untouched: int
) -> tuple[ChunkRef, ...]:
    """The first chunks of `previous` that a manifest of `tokens` may name again.

    The caller knows that rows of the first `untouched` tokens are those that `previous` stored: it is the
    lowest length that a rewind, an edit or a shift has gone back to since (the whole length, if none).
    Token ids and provenance are compared all the same. A chunk is kept whole or not at all, and none is
    kept that lacks window rows which the new length needs. Of a run of `chunk_tokens` that the new length
    fills none is kept but a whole one, nor of the last run when it has come to `MAX_PIECES`: they are written
    anew as one.
    """
    if previous is None:
        return ()
    return _kept(previous, previous, tokens, spans, len(tokens), untouched)


def kept_draft_chunks(
    previous: Manifest | None,
    draft: DraftState,
    tokens: tuple[int, ...],
    spans: Sequence[Span],
    untouched: int,
) -> tuple[ChunkRef, ...]:
    """As `kept_chunks`, of the draft of `previous`: those that a manifest with `draft` may name again; none
    where another drafter made them. `untouched` counts the tokens of which the drafter's rows are."""
    stored = None if previous is None else previous.draft
    if previous is None or stored is None or stored.is_other(draft):
        return ()
    return _kept(previous, stored, tokens, spans, draft.length, untouched, draft.ahead)


def _kept(
    previous: Manifest,
    stored: Stored,
    tokens: tuple[int, ...],
    spans: Sequence[Span],
    length: int,
    untouched: int,
    ahead: int = 0,
) -> tuple[ChunkRef, ...]:
    """`kept_chunks` of what `previous` has `stored`, for the first `length` of `tokens`; rows may depend on
    `ahead` tokens that follow them."""
    window = max_window(stored.layout)
    kept: list[ChunkRef] = []
    for chunk in stored.chunks:
        start, stop = chunk.start, chunk.stop
        whole = stop - start == stored.chunk_tokens
        filled = chunk_floor(start, stored.chunk_tokens) + stored.chunk_tokens <= length
        if stop > min(untouched - ahead, length, stored.length) or (filled and not whole):
            break
        if previous.tokens[start : stop + ahead] != tokens[start : stop + ahead]:
            break
        if spans_within(previous.spans, start, stop) != spans_within(spans, start, stop):
            break
        if not _has_rows(stored.layout, chunk):
            break
        if window and stop > length - window and _window_start(chunk) > max(start, length - window):
            break
        kept.append(chunk)
    last = [chunk for chunk in kept if chunk.start >= chunk_floor(length, stored.chunk_tokens)]
    if len(last) >= MAX_PIECES and last[-1].stop < length:
        del kept[-len(last) :]
    return tuple(kept)


def first_new(
    previous: Manifest | None, tokens: tuple[int, ...], spans: Sequence[Span], untouched: int
) -> int:
    """The first token whose rows a save must write: what to give `Engine.snapshot` as `since`.

    Arguments as for `kept_chunks`.
    """
    kept = kept_chunks(previous, tokens, spans, untouched)
    return kept[-1].stop if kept else 0


def first_new_of_draft(
    previous: Manifest | None,
    draft: DraftState,
    tokens: tuple[int, ...],
    spans: Sequence[Span],
    untouched: int,
) -> int:
    """The first token whose rows of the draft a save must write. Arguments as for `kept_draft_chunks`."""
    kept = kept_draft_chunks(previous, draft, tokens, spans, untouched)
    return kept[-1].stop if kept else 0


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:n], np.int64) != np.asarray(b[:n], np.int64))
    return int(differ[0]) if len(differ) else n


def max_window(layout: Layout) -> int:
    """The largest window of the layout, 0 if it has no window parts."""
    return max((spec.window for spec in layout if spec.window is not None), default=0)


def window_floor(stored: Stored, length: int) -> int:
    """The first token whose window rows a resume at `length` wants: those needed, one more so that the last
    token can be computed again for the canary, and the rest of the last partial chunk, so that the next
    save can write that chunk anew with all of them."""
    return min(needed_window(stored.layout, length), chunk_floor(length, stored.chunk_tokens))


def needed_window(layout: Layout, length: int) -> int:
    """The first token whose window rows going on at `length` needs, or computing its last token anew."""
    return max(0, length - max_window(layout) - 1)


def _covered(layout: Layout, chunks: Sequence[ChunkRef]) -> int:
    """The largest length whose token and block rows are all named."""
    for chunk in chunks:
        if parts_of(layout, PartKind.TOKEN) and chunk.blob(PartKind.TOKEN) is None:
            return chunk.start
        blocks = parts_of(layout, PartKind.BLOCK)
        if chunk.blob(PartKind.BLOCK) is None and rows_nbytes(blocks, chunk.start, chunk.stop):
            return min((chunk.start // spec.block + 1) * spec.block - 1 for spec in blocks)
    return chunks[-1].stop if chunks else 0


def _has_rows(layout: Layout, chunk: ChunkRef) -> bool:
    """Whether all token and block rows of one chunk are named."""
    return _covered(layout, (chunk,)) == chunk.stop


def _window_start(chunk: ChunkRef) -> int:
    """The first token of the chunk whose window rows are named; its end if none are."""
    blob = chunk.blob(PartKind.WINDOW)
    return chunk.stop if blob is None else blob.start


def _window_ranges(stored: Stored) -> list[tuple[int, int]]:
    """(first, last) lengths whose window rows are named, whatever else they need."""
    if not parts_of(stored.layout, PartKind.WINDOW):
        return [(0, stored.length)]
    window = max_window(stored.layout)
    return [
        (start + window if start else 0, stop)
        for start, stop in window_runs(stored.chunks)
        if not start or start + window <= stop
    ]


def window_runs(chunks: Sequence[ChunkRef]) -> list[tuple[int, int]]:
    """Runs [start, stop) of consecutive tokens whose window rows are named."""
    runs: list[tuple[int, int]] = []
    for chunk in chunks:
        start = _window_start(chunk)
        if start == chunk.stop:
            continue
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], chunk.stop)
        else:
            runs.append((start, chunk.stop))
    return runs
