"""What a re-encoding would do, told before anything is read: kept, converted, dropped, recomputed,
refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby

from engine.errors import ConfigError, FingerprintMismatch, NoCheckpoint, TenutoError
from engine.state import Fingerprint, Layout, PartKind, PartSpec, parts_of
from serialization.blobs import BlobId
from serialization.chunks import rows_nbytes
from serialization.limits import MAX_CHUNKS, MAX_RAW_NBYTES, refuse_above
from serialization.manifest import Manifest
from serialization.points import point_nbytes
from serialization.reencode.forms import Forms, MemoryForm
from serialization.reencode.outline import Outline, nbytes_of
from serialization.reencode.reencoding import Reencoding, Windows
from serialization.refs import ROW_KINDS, BlobRef, ChunkBlob, ChunkRef, Stored, StoredLogits
from serialization.resume import cut, last_resumable, resumable_lengths, window_runs


class Fate(StrEnum):
    """What becomes of something."""

    KEPT = "kept"  # bit for bit
    CONVERTED = "converted"  # other values, or other bytes for the same values
    DROPPED = "dropped"
    RECOMPUTED = "recomputed"  # not stored: who goes on reads the tokens again
    REFUSED = "refused"  # and so nothing is done


@dataclass(frozen=True, slots=True)
class Item:
    """One line of a plan. `nbytes` are those of its rows now, `becomes` those after, before encoding."""

    what: str
    fate: Fate
    nbytes: int
    becomes: int
    why: str


@dataclass(frozen=True, slots=True)
class Conversion:
    """How rows of other dtypes are made: those of `before` read, those of `after` written."""

    before: MemoryForm
    after: MemoryForm


@dataclass(frozen=True, slots=True)
class Plan:
    """`source` is the manifest cut to what is wanted of it. `refusals` are the errors that `reencode` raises,
    the first one first; where there are any, the rest says what could be said nevertheless."""

    source: Manifest
    wanted: Reencoding
    conversion: Conversion | None
    items: tuple[Item, ...]
    refusals: tuple[TenutoError, ...]

    @property
    def layout(self) -> Layout:
        return self.source.layout if self.conversion is None else self.conversion.after.layout

    @property
    def fingerprint(self) -> Fingerprint:
        made = self.source.fingerprint
        return made if self.conversion is None else replace(made, meaning=self.conversion.after.meaning)

    @property
    def chunk_tokens(self) -> int:
        return self.wanted.chunk_tokens or self.source.chunk_tokens

    @property
    def nbytes(self) -> int:
        """Of all rows and point state after, before encoding."""
        return sum(item.becomes for item in self.items)

    def outline(self, stored: Stored) -> Outline:
        """The new chunks of the source, or of its draft."""
        return Outline.of(stored, stored.length, self.chunk_tokens, self.wanted.windows)

    def require(self) -> None:
        """Raises the first refusal, if there is one."""
        for refusal in self.refusals:
            raise refusal


def plan_reencoding(manifest: Manifest, wanted: Reencoding, forms: Forms | None = None) -> Plan:
    """What `reencode` would do. `forms` is of the model that made the state, for other dtypes.

    Only the manifest is looked at: that its blobs are there, and sound, shows when they are read.
    """
    refusals: list[TenutoError] = []
    source, conversion = manifest, None
    try:
        source = cut(manifest, manifest.length if wanted.cut is None else wanted.cut)
    except NoCheckpoint as error:
        refusals.append(error)
    try:
        conversion = _conversion(source, wanted, forms)
    except (ConfigError, FingerprintMismatch) as error:
        refusals.append(error)
    if conversion is not None and source.draft is not None:
        source = replace(source, draft=None)
    plan = Plan(source, wanted, conversion, (), ())
    refusals += _too_large(plan)
    refusals += _not_full(plan)
    return replace(plan, items=tuple(_items(manifest, plan, refusals)), refusals=tuple(refusals))


def _conversion(source: Manifest, wanted: Reencoding, forms: Forms | None) -> Conversion | None:
    """None where all rows stay of the dtypes that they are of."""
    meaning = source.fingerprint.meaning
    stored = {name: meaning.get(name) for name in ("type_k", "type_v")}
    asked = {"type_k": wanted.type_k, "type_v": wanted.type_v}
    changed = {
        name: dtype
        for name, dtype in asked.items()
        if stored[name] is not None and dtype not in (None, stored[name])
    }
    if not changed or (forms is None and not source.tokens):
        return None
    if forms is None:
        raise ConfigError(
            "rows of another dtype need the model that made them: it says which are rotated, and how"
        )
    # a field that the model has no rows of is not in its meaning, and any dtype will do
    type_k, type_v = (str(stored[name] or "f32") for name in ("type_k", "type_v"))
    before = forms(type_k, type_v)
    for field, theirs, mine in source.fingerprint.differing(Fingerprint(before.meaning)):
        raise FingerprintMismatch(
            f"the state was made with {field} = {theirs}, this model has {mine}", field=field
        )
    if before.layout != source.layout:
        raise FingerprintMismatch("the state was made with another cache layout", field="layout")
    return Conversion(before, forms(changed.get("type_k") or type_k, changed.get("type_v") or type_v))


def _too_large(plan: Plan) -> Iterator[TenutoError]:
    """LimitExceeded where chunks would be too many, or a blob too large."""
    try:
        refuse_above("chunks", len(plan.outline(plan.source).starts()), MAX_CHUNKS)
        for piece in plan.outline(plan.source).pieces():
            refuse_above("rows of one blob, in bytes", nbytes_of(plan.layout, piece), MAX_RAW_NBYTES)
    except TenutoError as error:
        yield error


def _not_full(plan: Plan) -> Iterator[TenutoError]:
    """Where all window rows are wanted, and some were dropped."""
    source = plan.source
    if plan.wanted.windows is not Windows.FULL or not parts_of(source.layout, PartKind.WINDOW):
        return
    runs = [
        (start, min(stop, source.length))
        for start, stop in window_runs(source.chunks)
        if start < source.length
    ]
    if source.length and runs != [(0, source.length)]:
        had = ", ".join(f"[{start:,}, {stop:,})" for start, stop in runs) or "none"
        yield NoCheckpoint(
            f"the window rows of {had} of {source.length:,} tokens are stored; the others are to be had only "
            "by reading the tokens again",
            stored=runs,
        )


def _items(manifest: Manifest, plan: Plan, refusals: list[TenutoError]) -> Iterator[Item]:
    for refusal in refusals:
        yield Item("all", Fate.REFUSED, 0, 0, str(refusal))
    source = plan.source
    if source.length < manifest.length:
        yield Item(f"tokens from {source.length:,} on", Fate.DROPPED, 0, 0, f"{manifest.length:,} were cut")
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
        nbytes = becomes = 0
        count = 0
        for spec, new in same:
            rows = sum(spec.num_rows(piece.start, piece.stop) for piece in pieces if piece.kind is spec.kind)
            nbytes, becomes, count = (
                nbytes + rows * spec.row_nbytes,
                becomes + rows * new.row_nbytes,
                count + 1,
            )
        if not nbytes:
            continue
        layers = f"{what} of {count} layer{'s' if count > 1 else ''}"
        if before == after:
            yield Item(layers, Fate.KEPT, nbytes, becomes, f"{before}, the same bits{_encoded(plan)}")
        else:
            loss = "exactly" if (before, after) in _EXACT else "with a loss that is measured and stated"
            yield Item(layers, Fate.CONVERTED, nbytes, becomes, f"{before} to {after}, {loss}")


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
        rows_nbytes(specs, start, min(stop, source.length)) for start, stop in window_runs(source.chunks)
    )
    kept = sum(nbytes_of(source.layout, piece) for piece in outline.pieces() if piece.kind is PartKind.WINDOW)
    if stored > kept and outline.first_window:
        why = (
            f"going on needs those from {outline.first_window:,} on; only reading again gives the others back"
        )
        yield Item("window rows", Fate.DROPPED, stored - kept, 0, why)
    elif stored > kept:
        why = "chunks of so many tokens cannot name them: others behind them are not stored"
        yield Item("window rows", Fate.DROPPED, stored - kept, 0, why)


def _points(plan: Plan) -> Iterator[Item]:
    each = point_nbytes(parts_of(plan.source.layout, PartKind.POINT))
    kept = plan.outline(plan.source).checkpoints()
    lost = len(plan.source.checkpoints) - len(kept)
    if kept and each:
        yield Item(
            f"{len(kept)} checkpoints", Fate.KEPT, len(kept) * each, len(kept) * each, "point state stays"
        )
    if lost:
        yield Item(f"{lost} checkpoints", Fate.DROPPED, lost * each, 0, "their window rows go")
    if isinstance(plan.source.edge, StoredLogits):
        nbytes = plan.source.edge.ref.raw_nbytes
        yield Item("logits of the next token", Fate.KEPT, nbytes, nbytes, "as they were computed")


def _draft(manifest: Manifest, plan: Plan) -> Iterator[Item]:
    before, after = manifest.draft, plan.source.draft
    if before is None:
        return
    nbytes = sum(ref.raw_nbytes for ref in before.refs())
    if after is None:
        why = (
            "made beside rows of other dtypes" if plan.conversion is not None else "it cannot be cut to that"
        )
        yield Item("draft", Fate.DROPPED, nbytes, 0, f"{why}; its drafter reads the tokens again")
    else:
        becomes = sum(nbytes_of(after.layout, piece) for piece in plan.outline(after).pieces())
        becomes += len(after.checkpoints) * point_nbytes(parts_of(after.layout, PartKind.POINT))
        yield Item("draft", Fate.KEPT, nbytes, becomes, f"of {after.length:,} tokens, the same bits")


def _positions(plan: Plan) -> Iterator[Item]:
    """Where it could be gone on from and cannot be any more, and what has to be read again."""
    source = plan.source
    planned = replace(source, chunks=_drawn(plan), checkpoints=plan.outline(source).checkpoints())
    lost = sum(map(len, resumable_lengths(source))) - sum(map(len, resumable_lengths(planned)))
    if lost > 0:
        why = "rows that going on from there needs are not kept"
        yield Item(f"{lost:,} lengths to cut back to", Fate.DROPPED, 0, 0, why)
    at = last_resumable(planned, source.length)
    if at < source.length:
        why = "their rows are not stored, or cannot be gone on from"
        yield Item(f"tokens from {at:,} on", Fate.RECOMPUTED, 0, 0, why)


def _drawn(plan: Plan) -> tuple[ChunkRef, ...]:
    """The chunks as they will be, but of nothing."""
    nothing = BlobRef(BlobId(""), 0, 0)
    blobs: dict[int, list[ChunkBlob]] = {start: [] for start in plan.outline(plan.source).starts()}
    for piece in plan.outline(plan.source).pieces():
        blobs[piece.chunk].append(ChunkBlob(piece.kind, piece.start, nothing))
    stop, size = plan.source.length, plan.chunk_tokens
    return tuple(ChunkRef(start, min(start + size, stop), tuple(named)) for start, named in blobs.items())
