"""New data keys for what a tenant has stored, while it is used.

From the moment that there is a new key everything is sealed with it; what was sealed before stays readable,
and is sealed anew piece by piece. Cut off, it is as good as before, and done again it goes on.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import StateError, StoreError
from serialization.blobs import short
from sessions.keyring.tenants import TenantKeys
from sessions.stores.sealed import SealedStore


@dataclass(frozen=True, slots=True)
class Resealed:
    """How much was sealed anew; `problems` are blobs that could not be read, a line each."""

    num_blobs: int
    num_refs: int
    problems: tuple[str, ...]


def rotate(store: SealedStore, keys: TenantKeys) -> Resealed:
    """A new data key, and everything in `store` sealed with it. The old ones stay: copies need them."""
    keys.rotate()
    return reseal(store)


def rotate_and_drop(store: SealedStore, keys: TenantKeys) -> Resealed:
    """The same, and then the old data keys are destroyed: older copies cannot be read any more.

    Where something could not be sealed anew they stay, and `problems` says so. What the tenant has in another
    store than this is lost.
    """
    first = rotate(store, keys)
    again = reseal(store)  # nothing is left, or the keys are needed
    if again.problems:
        kept = "the old keys were kept, since not everything could be sealed anew"
        return Resealed(first.num_blobs, first.num_refs, (*again.problems, kept))
    keys.drop_old()
    return first


def reseal(store: SealedStore) -> Resealed:
    """Seal anew what older data keys than the newest sealed. Raises StoreError if nothing can be listed."""
    num_blobs = 0
    problems = []
    for info in list(store.list_blobs()):
        try:
            num_blobs += store.reseal_blob(info.blob)
        except (StateError, StoreError) as error:
            problems.append(f"{short(info.blob)}: {error}")
    return Resealed(num_blobs, store.reseal_refs(), tuple(problems))
