"""A manifest with other names for its blobs: in a store that names them otherwise, or in an archive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from serialization.blobs import BlobId
from serialization.manifest import Manifest
from serialization.refs import BlobRef, Checkpoint, ChunkRef, StoredLogits


def renamed(manifest: Manifest, names: Mapping[BlobId, BlobId]) -> Manifest:
    """`manifest` with every blob that is in `names` by its new name there."""
    edge, draft = manifest.edge, manifest.draft
    if isinstance(edge, StoredLogits):
        edge = StoredLogits(_ref(edge.ref, names))
    if draft is not None:
        draft = replace(
            draft, chunks=_chunks(draft.chunks, names), checkpoints=_checkpoints(draft.checkpoints, names)
        )
    return replace(
        manifest,
        chunks=_chunks(manifest.chunks, names),
        checkpoints=_checkpoints(manifest.checkpoints, names),
        edge=edge,
        draft=draft,
    )


def _chunks(chunks: tuple[ChunkRef, ...], names: Mapping[BlobId, BlobId]) -> tuple[ChunkRef, ...]:
    return tuple(
        replace(chunk, blobs=tuple(replace(blob, ref=_ref(blob.ref, names)) for blob in chunk.blobs))
        for chunk in chunks
    )


def _checkpoints(
    checkpoints: tuple[Checkpoint, ...], names: Mapping[BlobId, BlobId]
) -> tuple[Checkpoint, ...]:
    return tuple(
        each if each.ref is None else replace(each, ref=_ref(each.ref, names)) for each in checkpoints
    )


def _ref(ref: BlobRef, names: Mapping[BlobId, BlobId]) -> BlobRef:
    return replace(ref, blob=names.get(ref.blob, ref.blob))
