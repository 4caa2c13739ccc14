"""What two stored turns have in common, and where they part ways. Only manifests are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from engine.state import Layout, PartSpec, Pending, Span, Value
from serialization.blobs import BlobId, is_sealed
from serialization.manifest import Manifest, Message
from serialization.refs import BlobRef, StoredLogits
from serialization.resume import common_prefix


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """A field that differs; None where a side has none."""

    field: str
    a: Value
    b: Value


@dataclass(frozen=True, slots=True)
class Parting:
    """The first `common` of a list are equal; then `a` follows on one side, `b` on the other."""

    common: int
    a: tuple[Message, ...]
    b: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class TokenParting:
    """The first `common` token ids are equal; `a_more` and `b_more` are fed behind them. What follows there:
    an id that was fed or is pending, or None at the end of a side."""

    common: int
    a_more: int
    b_more: int
    a_next: int | None
    b_next: int | None


@dataclass(frozen=True, slots=True)
class Bytes:
    """Stored bytes of the blobs that both name, and of those that one names alone."""

    shared: int
    own_a: int
    own_b: int


@dataclass(frozen=True, slots=True)
class Difference:
    """Two turns compared. `meaning` and `making` are the halves of the fingerprint; parts of the layout are
    told by side. `rows_shared` counts the leading tokens whose rows both name in the very same blobs.

    `bytes` and `rows_shared` are None where one side is sealed and the other is not: equal content then has
    two names, and only a reader of both could tell.
    """

    tokens: TokenParting
    messages: Parting
    meaning: tuple[FieldDifference, ...]
    making: tuple[FieldDifference, ...]
    sampler: tuple[FieldDifference, ...]
    about: tuple[FieldDifference, ...]
    layout_a: Layout
    layout_b: Layout
    spans_a: tuple[Span, ...]
    spans_b: tuple[Span, ...]
    checkpoints_a: tuple[int, ...]
    checkpoints_b: tuple[int, ...]
    rows_shared: int | None
    bytes: Bytes | None

    @property
    def same_conversation(self) -> bool:
        """Whether both say the same, and mean the same by it: ids, messages, what follows, and the model."""
        tokens, messages = self.tokens, self.messages
        ids = tokens.a_next == tokens.b_next and not (tokens.a_more or tokens.b_more)
        return ids and not (messages.a or messages.b) and not (self.meaning or self.layout_a or self.layout_b)


def diff(a: Manifest, b: Manifest) -> Difference:
    """Compare two turns, of one store or of two."""
    shared = _shared(a, b)
    return Difference(
        tokens=_tokens(a, b),
        messages=_messages(a.messages, b.messages),
        meaning=_fields(a.fingerprint.meaning, b.fingerprint.meaning),
        making=_fields(a.fingerprint.making, b.fingerprint.making),
        sampler=_fields(_sampler(a), _sampler(b)),
        about=_fields(_about(a), _about(b)),
        layout_a=_beside(a.layout, b.layout),
        layout_b=_beside(b.layout, a.layout),
        spans_a=a.spans,
        spans_b=b.spans,
        checkpoints_a=tuple(each.position for each in a.checkpoints),
        checkpoints_b=tuple(each.position for each in b.checkpoints),
        rows_shared=None if shared is None else _rows_shared(a, b),
        bytes=shared,
    )


def _tokens(a: Manifest, b: Manifest) -> TokenParting:
    common = common_prefix(a.tokens, b.tokens)
    return TokenParting(common, a.length - common, b.length - common, _at(a, common), _at(b, common))


def _at(manifest: Manifest, index: int) -> int | None:
    if index < manifest.length:
        return manifest.tokens[index]
    return manifest.edge.token if isinstance(manifest.edge, Pending) else None


def _messages(a: tuple[Message, ...], b: tuple[Message, ...]) -> Parting:
    """Equal in what was said: where it lies among the tokens follows from the tokens."""
    common = 0
    for mine, theirs in zip(a, b, strict=False):
        if (mine.role, mine.text) != (theirs.role, theirs.text):
            break
        common += 1
    return Parting(common, a[common:], b[common:])


def _fields(a: Mapping[str, Value], b: Mapping[str, Value]) -> tuple[FieldDifference, ...]:
    names = sorted({*a, *b})
    return tuple(
        FieldDifference(each, a.get(each), b.get(each)) for each in names if a.get(each) != b.get(each)
    )


def _sampler(manifest: Manifest) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for field in fields(manifest.sampler):
        value = getattr(manifest.sampler, field.name)
        found[field.name] = value if isinstance(value, int | float) else str(list(value))
    return found


def _about(manifest: Manifest) -> dict[str, Value]:
    draft = manifest.draft
    return {
        "model": manifest.model,
        "template": manifest.template,
        "edge": _edge(manifest),
        "draft": None if draft is None else draft.length,
        "features": ", ".join(manifest.features) or None,
    }


def _edge(manifest: Manifest) -> str | None:
    match manifest.edge:
        case Pending(token):
            return f"token {token} is pending"
        case StoredLogits():
            return "the next token's logits"
        case None:
            return None


def _beside(layout: Layout, other: Layout) -> tuple[PartSpec, ...]:
    there = set(other)
    return tuple(spec for spec in layout if spec not in there)


def _shared(a: Manifest, b: Manifest) -> Bytes | None:
    mine, theirs = _blobs(a), _blobs(b)
    sealed = [any(is_sealed(blob) for blob in side) for side in (mine, theirs)]
    if mine and theirs and sealed[0] != sealed[1]:
        return None
    return Bytes(
        shared=sum(ref.nbytes for blob, ref in mine.items() if blob in theirs),
        own_a=sum(ref.nbytes for blob, ref in mine.items() if blob not in theirs),
        own_b=sum(ref.nbytes for blob, ref in theirs.items() if blob not in mine),
    )


def _blobs(manifest: Manifest) -> dict[BlobId, BlobRef]:
    return {ref.blob: ref for ref in manifest.blobs()}


def _rows_shared(a: Manifest, b: Manifest) -> int:
    """A chunk that is named by both may have more rows than one of them has tokens."""
    stop = 0
    for mine, theirs in zip(a.chunks, b.chunks, strict=False):
        if not mine.blobs or mine.blobs != theirs.blobs:
            break
        stop = min(mine.stop, theirs.stop)
    return min(stop, a.length, b.length)
