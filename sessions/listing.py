"""What a store holds: sessions with their own and shared bytes, and the bytes of the whole."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from serialization.blobs import BlobClass, BlobId, Store, blob_class
from serialization.manifest import Manifest
from sessions.catalog import Catalog, Contents
from sessions.policy import Policy
from sessions.session import SessionInfo


@dataclass(frozen=True, slots=True)
class Usage:
    """Stored bytes of a tenant. `rows_bytes` (with point state) and `manifest_bytes` are blobs in use,
    `superseded_bytes` blobs that no ref needs (gc takes them), `index_bytes` the rest."""

    rows_bytes: int
    manifest_bytes: int
    superseded_bytes: int
    index_bytes: int

    @property
    def total(self) -> int:
        return self.rows_bytes + self.manifest_bytes + self.superseded_bytes + self.index_bytes


def list_sessions(store: Store, policy: Policy) -> list[SessionInfo]:
    """Every session, the newest first."""
    contents = Catalog(store).contents()
    sizes = {info.blob: info.nbytes for info in store.list_blobs()}
    users = _users(contents)
    infos = [_info(contents, session, sizes, users, policy) for session in contents.sessions]
    return sorted(infos, key=lambda info: (info.updated, info.id), reverse=True)


def usage(store: Store) -> Usage:
    """The bytes of `store`, by what they are for; their sum is `store.usage()`."""
    referenced = Catalog(store).contents().referenced()
    rows = manifests = superseded = 0
    for info in store.list_blobs():
        if info.blob not in referenced:
            superseded += info.nbytes
        elif blob_class(info.blob) is BlobClass.MANIFEST:
            manifests += info.nbytes
        else:
            rows += info.nbytes
    index = max(0, store.usage() - rows - manifests - superseded)
    return Usage(rows, manifests, superseded, index)


def count_turns(manifest: Manifest) -> int:
    return sum(message.role == "user" for message in manifest.messages)


def _users(contents: Contents) -> Counter[BlobId]:
    """How many sessions and pins reference each blob. A session and its own pins count as one user."""
    sets: dict[str, set[BlobId]] = {}
    for entry in contents.entries():
        sets.setdefault(entry.manifest.session, set()).update(entry.blobs())
    return Counter(blob for blobs in sets.values() for blob in blobs)


def _info(
    contents: Contents, session: str, sizes: dict[BlobId, int], users: Counter[BlobId], policy: Policy
) -> SessionInfo:
    entry = contents.sessions[session]
    manifest = entry.manifest
    pins = tuple(sorted(name for name, pin in contents.pins.items() if pin.manifest.session == session))
    blobs = set(entry.blobs()).union(*(contents.pins[name].blobs() for name in pins))
    expires = None
    if policy.session_ttl is not None and not pins:
        expires = manifest.updated + policy.session_ttl
    return SessionInfo(
        id=session,
        name=manifest.name,
        title=manifest.title,
        parent=manifest.forked_from.session if manifest.forked_from else None,
        model=manifest.model,
        generation=manifest.generation,
        created=manifest.created,
        updated=manifest.updated,
        length=manifest.length,
        turns=count_turns(manifest),
        own_bytes=sum(sizes.get(blob, 0) for blob in blobs if users[blob] == 1),
        shared_bytes=sum(sizes.get(blob, 0) for blob in blobs if users[blob] > 1),
        pins=pins,
        expires=expires,
    )
