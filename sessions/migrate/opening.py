"""Both ends of a migration, opened: a source is read as it lies there and never made, a destination is made
where there is none."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.errors import SealRefused, SessionNotFound, UsageError
from serialization.blobs import Store
from sessions.keyring.ring import Keyring
from sessions.migrate.endpoints import ArchiveEnd, Endpoint, ForeignEnd, folder_of, without_password
from sessions.stores.base import StoreConfig, tenant_key
from sessions.stores.memory import MemoryStore
from sessions.stores.open import open_raw, open_store, without_tiers
from sessions.stores.sealed import roomier
from sessions.stores.sealing import is_sealed_store, sealed_store
from sessions.stores.tenants import stored_tenants


@dataclass(frozen=True, slots=True)
class Keys:
    """What opens the source and the destination; None where nothing was given. `clear`: the destination lies
    in the clear, whatever was given."""

    source: Keyring | None = None
    target: Keyring | None = None
    clear: bool = False


#: Opens a destination: by its address, whose it is, and by what keys.
Opening = Callable[[str, str, Keys], Store]


def open_source(url: str, tenant: str, keys: Keys) -> Store:
    """What `tenant` has at `url`, sealed or not as it is. Raises SessionNotFound where there is nothing,
    SealRefused, StoreUnavailable."""
    if tenant_key(tenant) not in stored_tenants(url):
        raise SessionNotFound(f"there is nothing of {tenant} in the store {without_password(url)}")
    config = StoreConfig()
    store = open_raw(url, tenant, roomier(config))
    try:
        if not is_sealed_store(store):
            return store
        if keys.source is None:
            raise SealRefused("the source is sealed: give the folder of its keys and its master key")
        return sealed_store(store, keys.source, tenant, config)
    except BaseException:
        store.close()
        raise


def open_target(url: str, tenant: str, keys: Keys) -> Store:
    """The store of `tenant` at `url`, which is made where there is none: sealed where keys were given, and
    not asked to lie in the clear. Raises SealRefused where it is otherwise."""
    return open_store(url, tenant, keyring=None if keys.clear else keys.target)


def open_planned(url: str, tenant: str, keys: Keys) -> Store:
    """The same where nothing may be made: an empty store in its place if there is none."""
    if tenant_key(tenant) not in stored_tenants(url):
        return MemoryStore(tenant=tenant)
    return open_target(url, tenant, keys)


def one_way(source: str, target: str) -> None:
    """Raises UsageError where both are the same store."""
    if canonical(source) == canonical(target):
        raise UsageError("SRC and DST are the same store")


def apart(source: Endpoint, target: Endpoint) -> None:
    """Raises UsageError where both are the same file: what is only read would be replaced."""
    match source, target:
        case (
            ArchiveEnd(Path() as one) | ForeignEnd(one),
            ArchiveEnd(Path() as other) | ForeignEnd(other),
        ) if one.exists() and other.exists() and one.samefile(other):
            raise UsageError("SRC and DST are the same file")


def canonical(url: str) -> str:
    """One spelling of an address, without quick tiers and password."""
    last = without_tiers(url)
    folder = folder_of(last)
    return without_password(last) if folder is None else os.path.realpath(Path(folder))
