"""From a store's address to a store."""

from __future__ import annotations

import re
from collections.abc import Callable
from urllib.parse import unquote, urlsplit

from engine.errors import UsageError
from serialization.blobs import Store
from sessions.stores.base import StoreConfig, check_tenant
from sessions.stores.disk import DiskStore
from sessions.stores.memory import MemoryStore

_SCHEME = re.compile(r"[a-z][a-z0-9+]+:")


def open_store(url: str, tenant: str = "default", config: StoreConfig | None = None) -> Store:
    """Opens the store of `tenant` at `url`: a folder's path, or one of the forms in `SCHEMES`.

    Raises UsageError for an address of no known form, NameRefused, StoreUnavailable, StoreFull.
    """
    check_tenant(tenant)
    config = config or StoreConfig()
    found = _SCHEME.match(url)
    if found is None:
        if not url:
            raise UsageError("a store's address is empty")
        return DiskStore(url, tenant, config)
    maker = SCHEMES.get(found[0].removesuffix(":"))
    if maker is None:
        known = ", ".join(f"{scheme}:" for scheme in SCHEMES)
        raise UsageError(f"unknown kind of store {found[0]!r} (known: a folder's path, {known})")
    return maker(url, tenant, config)


def _memory(url: str, tenant: str, config: StoreConfig) -> Store:
    if url != "memory:":
        raise UsageError(f"a store in memory has no address beyond 'memory:', got {url!r}")
    return MemoryStore(tenant=tenant, config=config)


def _disk(url: str, tenant: str, config: StoreConfig) -> Store:
    path = url.removeprefix("disk:")
    if not path:
        raise UsageError("disk: needs a folder's path")
    return DiskStore(path, tenant, config)


def _file(url: str, tenant: str, config: StoreConfig) -> Store:
    parts = urlsplit(url)
    if (
        parts.netloc not in ("", "localhost")
        or not parts.path.startswith("/")
        or parts.query
        or parts.fragment
    ):
        raise UsageError(f"a file address is file:///FOLDER, got {url!r}")
    return DiskStore(unquote(parts.path), tenant, config)


SCHEMES: dict[str, Callable[[str, str, StoreConfig], Store]] = {
    "disk": _disk,
    "file": _file,
    "memory": _memory,
}
