"""Erasing a tenant (or a session): by its keys, which no store has, so that no copy can be read any more."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.errors import SealRefused, UsageError
from serialization.blobs import Store
from sessions.keyring.keyset import Scope
from sessions.keyring.master import MasterKeys
from sessions.keyring.tenants import TenantKeys
from sessions.keys import ApiKeys
from sessions.manager import SessionManager
from sessions.stores.sealing import is_sealed_store


@dataclass(frozen=True, slots=True)
class Erasure:
    """What was done: whether `keys` were destroyed (so that no backup can be read), how many API keys were
    revoked."""

    keys: bool
    api_keys: int


def erase_keys(folder: Path, tenant: str) -> bool:
    """Destroy the tenant's keys in `folder`; that needs no master key. Returns whether it had any."""
    return TenantKeys(folder, tenant, MasterKeys()).erase()


def erase_tenant(store: Store, folder: Path, tenant: str) -> Erasure:
    """Destroy the tenant's keys, revoke its API keys, and delete all that it has in `store`, which is opened
    raw. Nobody may be writing for it. Done again it finishes what was cut off.

    Raises SealRefused where the store is sealed with keys that are not in `folder`; then nothing was done.
    """
    keys = erase_keys(folder, tenant)
    if not keys and is_sealed_store(store):
        raise SealRefused(
            f"what {tenant} has is sealed, and its keys are not in {folder}: only they can erase its backups"
        )
    revoked = ApiKeys(folder).revoke_all(tenant)
    store.wipe()
    return Erasure(keys, revoked)


def erase_session(manager: SessionManager, keys: TenantKeys, ref: str) -> str:
    """Delete a session with its pins, and destroy its own keys: neither this store nor a backup can tell any
    more what was said. Returns its id.

    Raises UsageError where sessions have no keys of their own, SessionNotFound, LeaseHeld.
    """
    if keys.scope is not Scope.SESSION:
        raise UsageError(
            f"the sessions of {keys.tenant} have no keys of their own: they go with their tenant"
        )
    session = manager.find(ref)
    for pin in manager.pins():
        if pin.session == session:
            manager.unpin(pin.name)
    manager.delete(session)
    keys.erase_session(session)
    return session
