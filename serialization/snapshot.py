"""States to blobs and back, through a store: what a save writes and a resume reads.

A save puts the blobs that `write_state` makes, then the caller's manifest, then swaps the ref. A drafter's
state goes the same way as its target's, in the same save.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from engine.errors import BlobMissing, Corrupt
from engine.state import DraftState, Edge, NextLogits, Pending, Run, SequenceState
from serialization.arriving import ArrivingRows
from serialization.blobs import BlobClass, BlobId, Store, short
from serialization.chunks import CHUNK_TOKENS
from serialization.drafts import StoredDraft
from serialization.manifest import Manifest, StoredEdge
from serialization.parallel import in_order
from serialization.pipelines import DEFAULT, CodecSet
from serialization.points import decode_logits, encode_logits
from serialization.reading import Reader, get
from serialization.refs import BlobRef, Checkpoint, ChunkRef, Stored, StoredLogits
from serialization.resume import (
    common_prefix,
    draft_within,
    kept_chunks,
    kept_draft_chunks,
    require_resumable,
    spans_within,
)
from serialization.writing import Writer, WrittenRows, put

#: Bytes of point state that a manifest names at most, before encoding; as much again of its draft.
POINT_BUDGET = 2**28


@dataclass(frozen=True, slots=True)
class WrittenState:
    """Where a state's rows, point state, edge and draft are stored now: fields for the manifest.

    `num_blobs` and `nbytes` count what was put by this save, as stored.
    """

    chunks: tuple[ChunkRef, ...]
    checkpoints: tuple[Checkpoint, ...]
    edge: StoredEdge
    draft: StoredDraft | None
    chunk_tokens: int
    num_blobs: int
    nbytes: int


def write_state(
    store: Store,
    state: SequenceState,
    previous: Manifest | None,
    untouched: int,
    codecs: CodecSet = DEFAULT,
    workers: int = 1,
    point_budget: int = POINT_BUDGET,
    draft_untouched: int = 0,
) -> WrittenState:
    """Put what `previous` has not stored yet of `state`, and say where everything is.

    Rows of the first `untouched` tokens are known to be those that `previous` stored (see
    `resume.kept_chunks`), of the draft those of `draft_untouched`. `state` has token and block rows from
    `resume.first_new(...)` on at least, its draft from `resume.first_new_of_draft(...)`; its tokens and spans
    are complete. Of its checkpoints those are named that fit into `point_budget` bytes of point state. With
    `workers` above 1 blobs are encoded and put by as many threads. Chunks have as many tokens as
    those of `previous`.

    Of a state without a draft that of `previous` is named again, as far as the tokens are the same: it was
    saved by an engine that does not draft, and the next one may.

    Raises FingerprintMismatch if `previous` is of another layout or model, Corrupt if the state lacks rows,
    LimitExceeded, StoreFull, StoreUnavailable; what was put by then is unreferenced.
    """
    if previous is not None:
        previous.refuse_other(state.fingerprint, state.layout)
    if state.draft is not None and state.draft.reach > state.length:
        raise Corrupt("the draft to be stored is of more tokens than there are")
    chunk_tokens = CHUNK_TOKENS if previous is None else previous.chunk_tokens
    save = _Save(store, previous, codecs, workers, point_budget, chunk_tokens)
    own = save.target(state, untouched)
    edge, logits = save.edge(state)
    draft, draft_blobs = save.draft(state, draft_untouched)
    blobs = (*own.put, *logits, *draft_blobs)
    return WrittenState(
        chunks=own.chunks,
        checkpoints=own.checkpoints,
        edge=edge,
        draft=draft,
        chunk_tokens=chunk_tokens,
        num_blobs=len(blobs),
        nbytes=sum(ref.nbytes for ref in blobs),
    )


@dataclass(frozen=True, slots=True)
class _Save:
    """What the parts of one save have in common."""

    store: Store
    previous: Manifest | None
    codecs: CodecSet
    workers: int
    point_budget: int
    chunk_tokens: int

    def target(self, state: SequenceState, untouched: int) -> WrittenRows:
        kept = kept_chunks(self.previous, state.tokens, state.spans, untouched)
        known = self.known(self.previous, state.tokens, min(untouched, state.length))
        writer = Writer(self.store, self.codecs, state.layout, state.length, state.rows, self.chunk_tokens)
        return writer.write(state.points, kept, known, self.point_budget, self.workers)

    def draft(self, state: SequenceState, untouched: int) -> tuple[StoredDraft | None, tuple[BlobRef, ...]]:
        """Of the checkpoints that a drafter has the one at its end is put alone; those of earlier turns are
        named already."""
        draft = state.draft
        if draft is None or not draft.length:
            return draft_of(self.previous, state.tokens), ()
        past = None if self.previous is None else self.previous.draft
        if past is not None and past.is_other(draft):
            past = None
        kept = kept_draft_chunks(self.previous, draft, state.tokens, state.spans, untouched)
        known = self.known(past, state.tokens, min(untouched, draft.reach), draft.ahead)
        last = [point for point in draft.points if point.position == draft.length]
        writer = Writer(self.store, self.codecs, draft.layout, draft.length, draft.rows, self.chunk_tokens)
        written = writer.write(last, kept, known, self.point_budget, self.workers)
        stored = StoredDraft(
            draft.fingerprint,
            draft.layout,
            draft.length,
            written.chunks,
            written.checkpoints,
            draft.ahead,
            self.chunk_tokens,
        )
        return stored, written.put

    def known(
        self, past: Stored | None, tokens: tuple[int, ...], at_most: int, ahead: int = 0
    ) -> tuple[Checkpoint, ...]:
        """The checkpoints of `past` that are of the first `at_most` tokens, as far as these are the same;
        each is of those before it and of `ahead` behind it."""
        if past is None or self.previous is None:
            return ()
        same = min(at_most, common_prefix(self.previous.tokens, tokens)) - ahead
        return tuple(each for each in past.checkpoints if each.position <= same)

    def edge(self, state: SequenceState) -> tuple[StoredEdge, tuple[BlobRef, ...]]:
        if not isinstance(state.edge, NextLogits):
            return state.edge, ()
        data = encode_logits(state.edge.logits, state.length, self.codecs)
        ref = put(self.store, BlobClass.POINT, 4 * state.edge.logits.numel(), data)
        return StoredLogits(ref), (ref,)


def draft_of(previous: Manifest | None, tokens: Sequence[int]) -> StoredDraft | None:
    """What of the draft of `previous` is true of `tokens`."""
    if previous is None:
        return None
    return draft_within(previous.draft, common_prefix(previous.tokens, tokens))


def read_state(
    store: Store, manifest: Manifest, length: int | None = None, workers: int = 2, num_points: int = 1
) -> SequenceState:
    """The state of a manifest, or of its first `length` tokens, every size and digest checked.

    It has one run of each kind for every chunk: views of the decoded chunk, cut at `length`. Window rows
    begin where a resume needs them, or where the last partial chunk does. A state that was cut has the token
    that followed as its pending edge, and the draft that `resume.draft_within` gives. The caller compares
    fingerprints before (`Manifest.refuse_other`), and takes away a draft that is not wanted.

    Blobs are fetched and decoded by `workers` threads, each of which calls `store.get`. Of the checkpoints up
    to `length` the last `num_points` are read.

    Raises NoCheckpoint where the state could not go on, BlobMissing, Corrupt and other StateErrors,
    StoreUnavailable. Nothing is returned unless everything was right.
    """
    length = manifest.length if length is None else length
    require_resumable(manifest, length)
    reader = Reader(store, manifest, length)
    rows = in_order(reader.rows, reader.wanted(), workers)
    return replace(_but_rows(reader, manifest, workers, num_points), rows=tuple(rows))


@contextmanager
def arriving_state(
    store: Store, manifest: Manifest, length: int | None = None, workers: int = 4, num_points: int = 1
) -> Iterator[tuple[SequenceState, tuple[Run, ...]]]:
    """What `read_state` gives, but its rows apart and not read yet: `Engine.restore` puts them in place as
    they come, so that they are never in memory twice.

    Blobs are fetched ahead by one thread, and by up to `workers` where the store is slow. Raises as
    `read_state`, and of rows when they are read.
    """
    length = manifest.length if length is None else length
    require_resumable(manifest, length)
    reader = Reader(store, manifest, length)
    with ArrivingRows(reader, workers) as rows:
        yield _but_rows(reader, manifest, workers, num_points), rows.runs


def _but_rows(reader: Reader, manifest: Manifest, workers: int, num_points: int) -> SequenceState:
    store, length = reader.store, reader.length
    whole = length == manifest.length
    return SequenceState(
        layout=manifest.layout,
        fingerprint=manifest.fingerprint,
        tokens=manifest.tokens[:length],
        rows=(),
        points=reader.points(num_points),
        spans=spans_within(manifest.spans, 0, length),
        edge=_read_edge(store, manifest, length),
        sampler=manifest.sampler,
        canary=manifest.canary if whole else None,
        draft=_read_draft(store, draft_within(manifest.draft, length), workers),
    )


def _read_draft(store: Store, draft: StoredDraft | None, workers: int) -> DraftState | None:
    if draft is None:
        return None
    reader = Reader(store, draft, draft.length)
    rows = in_order(reader.rows, reader.wanted(), workers)
    points = reader.points(1)
    return DraftState(draft.fingerprint, draft.layout, draft.length, tuple(rows), points, draft.ahead)


def _read_edge(store: Store, manifest: Manifest, length: int) -> Edge:
    if length < manifest.length:
        return Pending(manifest.tokens[length]) if length else None
    match manifest.edge:
        case StoredLogits(ref):
            num_logits, rest = divmod(ref.raw_nbytes, 4)
            if rest or not num_logits:
                raise Corrupt("manifest: logits that are not whole numbers")
            return NextLogits(decode_logits(get(store, ref), length, num_logits))
        case edge:
            return edge


def missing_blobs(store: Store, manifest: Manifest) -> tuple[BlobId, ...]:
    """Blobs that `manifest` names and the store has not: what a save older than the grace asks before it
    swaps."""
    blobs = [ref.blob for ref in manifest.blobs()]
    return tuple(blob for blob, there in zip(blobs, store.has(blobs), strict=True) if not there)


def verify_kept(store: Store, manifest: Manifest) -> None:
    """Raises BlobMissing if a blob that `manifest` names is gone."""
    if missing := missing_blobs(store, manifest):
        raise BlobMissing(f"{len(missing)} stored blobs are gone, {short(missing[0])} first", blobs=missing)
