"""A stored state made anew as it is wanted: read from one store, put into another, a chunk at a time.

The old manifest and its blobs are left alone; the new one is put by nobody here. It differs in what was
wanted, and in what follows of that: names, times, generation and all that was said are the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from engine.errors import Corrupt
from engine.state import Layout, PartKind, Provenance, Rows, Span, parts_of
from serialization.blobs import BlobClass, Store, blob_class
from serialization.chunks import encode_rows
from serialization.losses import Loss
from serialization.manifest import Manifest, StoredEdge
from serialization.pipelines import DEFAULT
from serialization.points import decode_logits, decode_point, encode_logits, encode_point
from serialization.reading import get
from serialization.reencode.converting import PartConverter
from serialization.reencode.forms import Forms
from serialization.reencode.outline import Outline, Piece, nbytes_of
from serialization.reencode.plan import Conversion, Plan
from serialization.reencode.planning import plan_reencoding
from serialization.reencode.reencoding import Reencoding
from serialization.reencode.source import SourceRows
from serialization.refs import BlobRef, Checkpoint, ChunkBlob, ChunkRef, Stored, StoredLogits
from serialization.writing import put

#: told the bytes of rows that are done and of all there are, before encoding
Progress = Callable[[int, int], object]


def reencode(
    store: Store,
    manifest: Manifest,
    target: Store,
    wanted: Reencoding,
    forms: Forms | None = None,
    progress: Progress = lambda done, total: None,
) -> Manifest:
    """`manifest` as `wanted`, by blobs of `target`, which may be `store` itself, sealed or not.

    What need not change is put there as it is. Rows of another dtype are `re-encoded` from then on, and what
    that cost is in the manifest; all else is bit for bit what it was.

    Raises what the plan refuses (NoCheckpoint, ConfigError, FingerprintMismatch, LimitExceeded), and of
    reading and writing BlobMissing, Corrupt and other StateErrors, StoreFull, StoreUnavailable; what was put
    by then is unreferenced.
    """
    plan = plan_reencoding(manifest, wanted, forms)
    plan.require()
    return carry_out(store, plan, target, progress)


def carry_out(
    store: Store, plan: Plan, target: Store, progress: Progress = lambda done, total: None
) -> Manifest:
    """What was planned, of a plan without refusals. See `reencode`."""
    source = plan.source
    told = _Told(progress, plan)
    rows = _Memory(store, target, plan, source, plan.layout, plan.conversion, told)
    chunks, checkpoints = rows.chunks(), rows.checkpoints()
    made = replace(
        source,
        layout=plan.layout,
        fingerprint=plan.fingerprint,
        chunks=chunks,
        checkpoints=checkpoints,
        edge=_edge(store, target, plan),
        chunk_tokens=plan.chunk_tokens,
    )
    if source.draft is not None:
        draft = _Memory(store, target, plan, source.draft, source.draft.layout, None, told)
        made = replace(
            made,
            draft=replace(
                source.draft,
                chunks=draft.chunks(),
                checkpoints=draft.checkpoints(),
                chunk_tokens=plan.chunk_tokens,
            ),
        )
    losses = tuple(converter.loss for converter in rows.converters.values() if converter.is_used)
    if losses:
        spans = reencoded_spans(source.spans)
        made = replace(made, spans=spans, reencoded=(*source.reencoded, Loss(source.length, losses)))
    return made


def reencoded_spans(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """With what was computed as re-encoded. Other rows stay what they are, and what that forbids: to rewind
    what was shifted, or to share what is anybody's."""
    out: list[Span] = []
    for span in spans:
        if span.provenance is Provenance.COMPUTED:
            span = replace(span, provenance=Provenance.REENCODED)
        if out and out[-1].provenance is span.provenance:
            span = replace(span, start=out.pop().start)
        out.append(span)
    return tuple(out)


class _Told:
    """Counts what is done, for who watches."""

    def __init__(self, progress: Progress, plan: Plan) -> None:
        self._progress = progress
        self._total = sum(
            nbytes_of(each.layout, piece)
            for each in (plan.source, plan.source.draft)
            if each is not None
            for piece in plan.outline(each).pieces()
        )
        self._done = 0

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        self._progress(self._done, self._total)


class _Memory:
    """Rows and point state of one memory, a target's or a drafter's, out of one store and into another."""

    def __init__(
        self,
        store: Store,
        target: Store,
        plan: Plan,
        stored: Stored,
        layout: Layout,
        conversion: Conversion | None,
        told: _Told,
    ) -> None:
        self._store = store
        self._target = target
        self._stored = stored
        self._layout = layout
        self._told = told
        self._outline: Outline = plan.outline(stored)
        self._codecs = plan.wanted.codecs()
        self._rows = SourceRows(store, stored)
        self.converters: dict[tuple[str, int], PartConverter] = {}
        for old, new in zip(stored.layout, layout, strict=True):
            if conversion is not None and old != new:
                blocks = conversion.before.rotated.get(old.name, 0), conversion.after.rotated.get(new.name, 0)
                self.converters[old.name, old.layer] = PartConverter(old, new, blocks)

    def chunks(self) -> tuple[ChunkRef, ...]:
        blobs: dict[int, list[ChunkBlob]] = {start: [] for start in self._outline.starts()}
        for piece in self._outline.pieces():
            blobs[piece.chunk].append(ChunkBlob(piece.kind, piece.start, self._put(piece)))
            self._told.add(nbytes_of(self._stored.layout, piece))
        size, length = self._outline.chunk_tokens, self._outline.length
        return tuple(ChunkRef(at, min(at + size, length), tuple(named)) for at, named in blobs.items())

    def checkpoints(self) -> tuple[Checkpoint, ...]:
        specs = parts_of(self._stored.layout, PartKind.POINT)
        return tuple(
            each
            if each.ref is None
            else Checkpoint(each.position, self._put_point(specs, each.ref, each.position))
            for each in self._outline.checkpoints()
        )

    def _put(self, piece: Piece) -> BlobRef:
        specs = parts_of(self._layout, piece.kind)
        stays = not any((spec.name, spec.layer) in self.converters for spec in specs)
        ref = self._rows.ref(piece.kind, piece.start, piece.stop)
        if stays and ref is not None and self._codecs is None:
            return _carried(self._store, self._target, ref)
        rows = self._converted(piece)
        codecs = self._codecs or DEFAULT
        data = encode_rows(piece.kind, specs, piece.start, piece.stop, rows, codecs)
        return put(self._target, BlobClass.ROWS, nbytes_of(self._layout, piece), data)

    def _converted(self, piece: Piece) -> tuple[Rows, ...]:
        """The rows of a piece, cut out of stored runs, in the dtypes that are wanted."""
        specs = parts_of(self._stored.layout, piece.kind)
        made = []
        for run in self._rows.runs(piece.kind, piece.start, piece.stop):
            start, stop = max(run.start, piece.start), min(run.stop, piece.stop)
            parts = []
            for spec, rows in zip(specs, run.parts, strict=True):
                cut = rows[spec.num_rows(run.start, start) : spec.num_rows(run.start, stop)]
                converter = self.converters.get((spec.name, spec.layer))
                parts.append(cut if converter is None else converter.convert(cut))
            made.append(Rows(piece.kind, start, stop, tuple(parts)))
        return tuple(made)

    def _put_point(self, specs: Layout, ref: BlobRef, position: int) -> BlobRef:
        if self._codecs is None:
            return _carried(self._store, self._target, ref)
        point = decode_point(get(self._store, ref), specs, position)
        return put(self._target, BlobClass.POINT, ref.raw_nbytes, encode_point(specs, point, self._codecs))


def _edge(store: Store, target: Store, plan: Plan) -> StoredEdge:
    edge, codecs = plan.source.edge, plan.wanted.codecs()
    if not isinstance(edge, StoredLogits):
        return edge
    if codecs is None:
        return StoredLogits(_carried(store, target, edge.ref))
    num_logits, rest = divmod(edge.ref.raw_nbytes, 4)
    if rest or not num_logits:
        raise Corrupt("manifest: logits that are not whole numbers")
    logits = decode_logits(get(store, edge.ref), plan.source.length, num_logits)
    data = encode_logits(logits, plan.source.length, codecs)
    return StoredLogits(put(target, BlobClass.POINT, edge.ref.raw_nbytes, data))


def _carried(store: Store, target: Store, ref: BlobRef) -> BlobRef:
    """The same blob in `target`, which may name it otherwise."""
    return replace(ref, blob=target.put(blob_class(ref.blob), get(store, ref)))
