"""Whether a store is sealed is decided once, while it is empty. After that it is opened with its keys or not
at all, and one in the clear is never half sealed.

All processes of a store are given the same keys: each looks when it opens the store, and not again.
"""

from __future__ import annotations

import contextlib
from typing import Any

from engine.errors import Corrupt, IndexDamaged, SealRefused, StateError, UnknownVersion
from serialization.blobs import Store, is_sealed
from serialization.canonical import unpack
from serialization.sealed import read_blob
from sessions.keyring.ring import Keyring
from sessions.keyring.tenants import TenantKeys
from sessions.stores.base import StoreConfig
from sessions.stores.sealed import MARKER, VERSION, SealedStore, marker

#: Some may be of sessions that were erased, or damaged like the index.
_BLOBS_TRIED = 100


def refuse_sealed(store: Store) -> None:
    """Raises SealRefused where `store` is a sealed one, and was opened without keys."""
    if is_sealed_store(store):
        raise SealRefused(
            "this store is sealed: give the folder of its keys and the master key"
            " (--keys and --master-key, or TENUTO_KEYS and TENUTO_MASTER_KEY)"
        )


def sealed_store(inner: Store, keyring: Keyring, tenant: str, config: StoreConfig) -> SealedStore:
    """The store of `tenant`, whose keys seal it: a new one gets keys if the tenant has none, and its mark.

    Raises SealRefused where it lies in the clear or other keys sealed it, Erased, KeyFileRefused.
    """
    keys = keyring.tenant(tenant)
    if not is_sealed_store(inner):
        if _holds_anything(inner):
            raise SealRefused(
                f"the store of {tenant} lies in the clear, and is not sealed by giving keys: open it without"
                " a master key, or move its sessions to a new store with `tenuto migrate`"
            )
        keys.make(keyring.scope)
        _mark(inner, keys)
    _check_mark(inner, keys)
    return SealedStore(inner, keys, config)


def is_sealed_store(store: Store) -> bool:
    """Whether `store`, opened raw, is marked as sealed."""
    try:
        return store.read(MARKER) is not None
    except IndexDamaged:  # the blobs tell as well
        return any(is_sealed(info.blob) for info in store.list_blobs())


def _holds_anything(store: Store) -> bool:
    try:
        if next(iter(store.list_refs("")), None) is not None:
            return True
    except IndexDamaged:
        return True
    return next(iter(store.list_blobs()), None) is not None


def _mark(inner: Store, keys: TenantKeys) -> None:
    with keys.writing() as ciphers:
        inner.swap(MARKER, None, marker(ciphers))  # False where another process was faster


def _check_mark(inner: Store, keys: TenantKeys) -> None:
    ciphers = keys.current()
    try:
        value = inner.read(MARKER)
        mark: Any = None if value is None else unpack(value, "the mark of a sealed store")
    except IndexDamaged:
        _check_blobs(inner, keys)  # `rebuild` writes the mark anew, which only the right keys may
        return
    except Corrupt as error:
        raise SealRefused(f"this store is sealed in a way that is not known: {error}") from error
    if not isinstance(mark, dict) or mark.get("version") != VERSION:
        raise UnknownVersion("this store is sealed in a way that this build does not know")
    if mark.get("set") != ciphers.set_id:
        raise SealRefused(f"other keys than these of {keys.tenant} sealed this store")


def _check_blobs(inner: Store, keys: TenantKeys) -> None:
    """Raises SealRefused where there are sealed blobs, and these keys open none of the first ones."""
    seen = 0
    for info in inner.list_blobs():
        if not is_sealed(info.blob):
            continue
        seen += 1
        with contextlib.suppress(StateError):
            found = read_blob(info.blob, inner.get(info.blob))
            ciphers = keys.find(found.set_id)
            if ciphers is not None and ciphers.open_blob(info.blob, found) is not None:
                return
        if seen == _BLOBS_TRIED:
            break
    if seen:
        raise SealRefused(
            f"the index is damaged, and other keys than these of {keys.tenant} sealed the blobs"
        )
