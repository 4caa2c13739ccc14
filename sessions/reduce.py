"""Manifests with less in them: cut before a message, without damaged rows, any rows or all; or less sure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from engine.state import Pending, Provenance, Span
from serialization.blobs import BlobId
from serialization.chunks import CHUNK_TOKENS
from serialization.manifest import Manifest, ManifestKind
from serialization.refs import StoredLogits
from serialization.replies import replies_before
from serialization.resume import draft_within, spans_within


def before(manifest: Manifest, index: int) -> Manifest:
    """As the session stood before message `index`: its last id pending, its rows cut by reference."""
    ids = manifest.messages[index].start
    replies = replies_before(manifest.replies, index)
    past = replace(manifest, messages=manifest.messages[:index], replies=replies)
    return _cut(past, ids - 1) if ids else _cut(past, 0)


def bare(manifest: Manifest) -> Manifest:
    """Without rows, point state and draft; ids, text and edge stay, so that all can be read again."""
    chunks = tuple(replace(chunk, blobs=()) for chunk in manifest.chunks)
    return replace(manifest, chunks=chunks, checkpoints=(), draft=None)


def without(manifest: Manifest, damaged: Collection[BlobId]) -> Manifest:
    """Without the `damaged` blobs. If the next token's logits are among them, the last token is fed again. A
    draft of which one is damaged goes as a whole, and with the last of the rows."""
    chunks = tuple(
        replace(chunk, blobs=tuple(blob for blob in chunk.blobs if blob.ref.blob not in damaged))
        for chunk in manifest.chunks
    )
    points = tuple(p for p in manifest.checkpoints if p.ref is None or p.ref.blob not in damaged)
    draft = manifest.draft
    if draft is not None and any(ref.blob in damaged for ref in draft.refs()):
        draft = None
    left = replace(manifest, chunks=chunks, checkpoints=points, draft=draft)
    if not has_rows(left):
        left = replace(left, draft=None)
    if isinstance(left.edge, StoredLogits) and left.edge.ref.blob in damaged:
        return _cut(left, left.length - 1)
    return left


def tombstone(manifest: Manifest) -> Manifest:
    """What is left of a deleted session: that it was there, and is not."""
    empty = _cut(replace(manifest, messages=(), replies=()), 0)
    plain = replace(empty, chunk_tokens=CHUNK_TOKENS, reencoded=())
    return replace(
        plain,
        kind=ManifestKind.TOMBSTONE,
        pin=None,
        name=None,
        title="",
        note=None,
        salt=None,
        brought=None,
    )


def imported(manifest: Manifest) -> Manifest:
    """With its computed rows as somebody else's. Neighbouring spans that are the same by that are one. A salt
    is another tenant's, and means nothing here."""
    spans: list[Span] = []
    for span in manifest.spans:
        if span.provenance is Provenance.COMPUTED:
            span = replace(span, provenance=Provenance.IMPORTED)
        if spans and spans[-1].provenance is span.provenance:
            span = replace(span, start=spans.pop().start)
        spans.append(span)
    return replace(manifest, spans=tuple(spans), salt=None)


def has_rows(manifest: Manifest) -> bool:
    """Whether it names rows or point state of its own. A draft is of no use without."""
    return any(chunk.blobs for chunk in manifest.chunks) or any(p.ref for p in manifest.checkpoints)


def _cut(manifest: Manifest, length: int) -> Manifest:
    """The first `length` tokens; the id that followed is pending (unless nothing is left before it)."""
    if length == manifest.length:
        return manifest
    return replace(
        manifest,
        tokens=manifest.tokens[:length],
        spans=spans_within(manifest.spans, 0, length),
        chunks=tuple(chunk for chunk in manifest.chunks if chunk.start < length),
        checkpoints=tuple(point for point in manifest.checkpoints if point.position <= length),
        edge=Pending(manifest.tokens[length]) if length else None,
        canary=None,
        draft=draft_within(manifest.draft, length),
    )
