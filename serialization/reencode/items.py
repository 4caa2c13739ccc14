"""What is told of a re-encoding before it is done: a line for each thing, its fate, its bytes, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from engine.errors import TenutoError
from engine.state import PartKind, PartSpec, parts_of
from serialization.blobs import BlobId
from serialization.chunks import rows_nbytes
from serialization.manifest import Manifest
from serialization.points import point_nbytes
from serialization.reencode.outline import nbytes_of
from serialization.reencode.plan import Fate, Item, Plan
from serialization.refs import ROW_KINDS, BlobRef, ChunkBlob, ChunkRef, StoredLogits
from serialization.resume import last_resumable, resumable_lengths, window_runs


def items_of(manifest: Manifest, plan: Plan, refusals: Sequence[TenutoError]) -> Iterator[Item]:
    """Of what is planned for `manifest`, and of what refuses it."""
    for refusal in refusals:
        yield Item(Fate.REFUSED, "sessions", 1, str(refusal))
    source = plan.source
    if source.length < manifest.length:
        gone = manifest.length - source.length
        yield Item(Fate.DROPPED, "tokens", gone, f"the first {source.length:,} are wanted")
    yield from _rows(plan)
    yield from _windows(plan)
    yield from _points(plan)
    yield from _draft(manifest, plan)
    yield from _positions(plan)


def _rows(plan: Plan) -> Iterator[Item]:
    """A line for the parts of one name that are of one dtype before and after."""
    pairs = [
        (spec, new)
        for spec, new in zip(plan.source.layout, plan.layout, strict=True)
        if spec.kind in ROW_KINDS
    ]
    pieces = list(plan.outline(plan.source).pieces())
    for (what, before, after), same in groupby(sorted(pairs, key=_sort), key=lambda pair: _title(*pair)):
        count = nbytes = becomes = 0
        for spec, new in same:
            rows = sum(spec.num_rows(piece.start, piece.stop) for piece in pieces if piece.kind is spec.kind)
            nbytes += rows * spec.row_nbytes
            becomes += rows * new.row_nbytes
            count += 1
        if not nbytes:
            continue
        layers = f"layers of {what}"
        if before == after:
            why = f"{before}, the same bits{_encoded(plan)}"
            yield Item(Fate.KEPT, layers, count, why, nbytes, becomes)
        else:
            loss = "exactly" if (before, after) in _EXACT else "with a loss that is measured and stated"
            yield Item(Fate.CONVERTED, layers, count, f"{before} to {after}, {loss}", nbytes, becomes)


#: conversions that are exact where a rotation does not change
_EXACT = {("f16", "f32"), ("bf16", "f32")}


def _title(spec: PartSpec, new: PartSpec) -> tuple[str, str, str]:
    name = spec.name.removesuffix(f".{spec.layer:02}")
    return f"{spec.kind} rows {name}", spec.dtype, new.dtype


def _sort(pair: tuple[PartSpec, PartSpec]) -> tuple[int, tuple[str, str, str]]:
    return ROW_KINDS.index(pair[0].kind), _title(*pair)


def _encoded(plan: Plan) -> str:
    wanted = plan.wanted
    told = [] if wanted.codecs() is None else [f"codec {wanted.codec or 'default'}"]
    told += [] if wanted.level is None else [f"level {wanted.level}"]
    told += [] if plan.chunk_tokens == plan.source.chunk_tokens else [f"chunks of {plan.chunk_tokens} tokens"]
    return f", encoded anew: {', '.join(told)}" if told else ""


def _windows(plan: Plan) -> Iterator[Item]:
    source, outline = plan.source, plan.outline(plan.source)
    specs = parts_of(source.layout, PartKind.WINDOW)
    stored = sum(
        rows_nbytes(specs, start, min(stop, source.length))
        for start, stop in window_runs(source.chunks)
        if start < source.length
    )
    kept = sum(nbytes_of(source.layout, piece) for piece in outline.pieces() if piece.kind is PartKind.WINDOW)
    if stored <= kept:
        return
    why = "chunks of so many tokens cannot name them: others behind them are not stored"
    if outline.first_window:
        why = "going on needs the last ones alone; only reading the tokens again gives the others back"
    rows = (stored - kept) // sum(spec.row_nbytes for spec in specs)
    yield Item(Fate.DROPPED, "tokens' window rows", rows, why, stored - kept)


def _points(plan: Plan) -> Iterator[Item]:
    each = point_nbytes(parts_of(plan.source.layout, PartKind.POINT))
    kept = plan.outline(plan.source).checkpoints()
    lost = len(plan.source.checkpoints) - len(kept)
    if kept and each:
        nbytes = len(kept) * each
        yield Item(Fate.KEPT, "checkpoints", len(kept), "point state stays", nbytes, nbytes)
    if lost:
        yield Item(Fate.DROPPED, "checkpoints", lost, "their window rows go", lost * each)
    if isinstance(plan.source.edge, StoredLogits):
        nbytes = plan.source.edge.ref.raw_nbytes
        yield Item(Fate.KEPT, "logits of a next token", 1, "as they were computed", nbytes, nbytes)


def _draft(manifest: Manifest, plan: Plan) -> Iterator[Item]:
    before, after = manifest.draft, plan.source.draft
    if before is None:
        return
    nbytes = sum(ref.raw_nbytes for ref in before.refs())
    if after is None:
        why = "it cannot be cut to that" if plan.conversion is None else "made beside rows of other dtypes"
        yield Item(Fate.DROPPED, "drafts", 1, f"{why}; its drafter reads the tokens again", nbytes)
    else:
        becomes = sum(nbytes_of(after.layout, piece) for piece in plan.outline(after).pieces())
        becomes += len(after.checkpoints) * point_nbytes(parts_of(after.layout, PartKind.POINT))
        yield Item(Fate.KEPT, "drafts", 1, "the same bits", nbytes, becomes)


def _positions(plan: Plan) -> Iterator[Item]:
    """Where it could be gone on from and cannot be any more, and what has to be read again."""
    source = plan.source
    planned = replace(source, chunks=_drawn(plan), checkpoints=plan.outline(source).checkpoints())
    lost = sum(map(len, resumable_lengths(source))) - sum(map(len, resumable_lengths(planned)))
    if lost > 0:
        why = "rows that going on from there needs are not kept"
        yield Item(Fate.DROPPED, "lengths to cut back to", lost, why)
    at = last_resumable(planned, source.length)
    if at < source.length:
        why = "their rows are not stored, or cannot be gone on from"
        yield Item(Fate.RECOMPUTED, "tokens", source.length - at, why)


def _drawn(plan: Plan) -> tuple[ChunkRef, ...]:
    """The chunks as they will be, but of nothing."""
    nothing = BlobRef(BlobId(""), 0, 0)
    blobs: dict[int, list[ChunkBlob]] = {start: [] for start in plan.outline(plan.source).starts()}
    for piece in plan.outline(plan.source).pieces():
        blobs[piece.chunk].append(ChunkBlob(piece.kind, piece.start, nothing))
    stop, size = plan.source.length, plan.chunk_tokens
    return tuple(ChunkRef(start, min(start + size, stop), tuple(named)) for start, named in blobs.items())
