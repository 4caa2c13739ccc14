"""Which tenants have something in a store, as far as keys tell their names."""

from __future__ import annotations

from cli.app import DEFAULT_TENANT, App


def known_tenants(app: App, url: str) -> tuple[list[str], int]:
    """Tenants that have something in the store at `url` and whose names can be known, and how many others
    there are."""
    from sessions.keyring.master import MasterKeys
    from sessions.keyring.ring import Keyring
    from sessions.keys import ApiKeys
    from sessions.stores.base import tenant_key
    from sessions.stores.tenants import stored_tenants

    folder, there = app.unlocking.folder, stored_tenants(url)
    names = {DEFAULT_TENANT, app.tenant, *(key.tenant for key in ApiKeys(folder).list())}
    names |= {file.of for file in Keyring(folder, MasterKeys()).files() if file.erased is None}
    known = sorted(name for name in names if tenant_key(name) in there)
    return known, len(there) - len(known)
