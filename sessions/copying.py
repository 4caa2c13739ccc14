"""A session's own copy of another one's past, where each session's blobs are its own."""

from __future__ import annotations

import contextlib

from engine.errors import StateError
from serialization.blobs import BlobId, Store, blob_class
from serialization.manifest import Manifest
from serialization.renaming import renamed


def copied(manifest: Manifest, store: Store, own: Store) -> Manifest:
    """`manifest` by blobs of `own`, which is `store` or that store's scope of a session. In the store itself
    nothing is copied. What is missing or damaged is named as it was: it is no more missing than before."""
    if own is store:
        return manifest
    names: dict[BlobId, BlobId] = {}
    for ref in manifest.blobs():
        with contextlib.suppress(StateError):
            names[ref.blob] = own.put(blob_class(ref.blob), store.get(ref.blob))
    return renamed(manifest, names)
