"""From a store's address to a store."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from urllib.parse import unquote, urlsplit

from engine.errors import UsageError
from serialization.blobs import Store
from sessions.keyring.ring import Keyring
from sessions.stores.base import StoreConfig, check_tenant
from sessions.stores.disk import DiskStore
from sessions.stores.memory import MemoryStore
from sessions.stores.redis import RedisStore
from sessions.stores.redis_connect import CLUSTER, PLAIN, SENTINEL
from sessions.stores.retry import RetryingStore
from sessions.stores.sealed import SealedStore, roomier
from sessions.stores.sealing import refuse_sealed, sealed_store
from sessions.stores.tiered import CacheTier, TieredStore

_TIER = re.compile(r"(?P<kind>memory|disk)=(?P<size>[^,@]*)(@(?P<folder>[^,]+))?,")
_SCHEME = re.compile(r"[a-z][a-z0-9+]+:")


def open_store(
    url: str,
    tenant: str = "default",
    config: StoreConfig | None = None,
    keyring: Keyring | None = None,
) -> Store:
    """Opens the store of `tenant` at `url`: a folder's path, or one of the forms in `SCHEMES`. With `keyring`
    it is a sealed one, without in the clear; a new store is what it is opened as first.

    Raises UsageError for an address of no known form, NameRefused, StoreUnavailable, StoreFull; SealRefused
    where the store is sealed otherwise than is asked for, Erased, KeyFileRefused.
    """
    config = config or StoreConfig()
    store = open_raw(url, tenant, config if keyring is None else roomier(config))
    try:
        if keyring is not None:
            return sealed_store(store, keyring, tenant, config)
        refuse_sealed(store)
    except BaseException:
        store.close()
        raise
    return store


@contextlib.contextmanager
def opened_sealed(
    url: str, tenant: str, keyring: Keyring, config: StoreConfig | None = None
) -> Iterator[SealedStore]:
    """The sealed store of `tenant`, closed at the end. Raises as `open_store`."""
    config = config or StoreConfig()
    with contextlib.closing(open_raw(url, tenant, roomier(config))) as inner:
        yield sealed_store(inner, keyring, tenant, config)


@contextlib.contextmanager
def opened_raw(url: str, tenant: str, config: StoreConfig | None = None) -> Iterator[Store]:
    """`open_raw`, closed at the end."""
    with contextlib.closing(open_raw(url, tenant, config or StoreConfig())) as store:
        yield store


def open_raw(url: str, tenant: str, config: StoreConfig) -> Store:
    """The same as it lies there, sealed or not: for who needs no content."""
    check_tenant(tenant)
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


def _redis(url: str, tenant: str, config: StoreConfig) -> Store:
    return RetryingStore(RedisStore(url, tenant, config), config.attempts)


def _tiered(url: str, tenant: str, config: StoreConfig) -> Store:
    """`tiered:memory=SIZE,disk=SIZE@FOLDER,STORE`: quick tiers in their order, then the last store."""
    caches: list[CacheTier] = []
    rest = url.removeprefix("tiered:")
    while found := _TIER.match(rest):
        kind, size, folder = found["kind"], parse_size(found["size"]), found["folder"]
        if (kind == "disk") != (folder is not None):
            raise UsageError("a tier is memory=SIZE or disk=SIZE@FOLDER")
        store = DiskStore(folder, tenant, config) if folder else MemoryStore(tenant=tenant, config=config)
        caches.append(CacheTier(store, size))
        rest = rest[found.end() :]
    if not caches or not rest:
        raise UsageError(f"a tiered store is tiered:memory=SIZE,disk=SIZE@FOLDER,STORE; got {url!r}")
    return TieredStore(caches, open_raw(rest, tenant, config))


def without_tiers(url: str) -> str:
    """The address of the last store, where `url` has quick tiers before it."""
    rest = url.removeprefix("tiered:")
    while url != rest and (found := _TIER.match(rest)):
        rest = rest[found.end() :]
    return rest


def parse_size(text: str) -> int:
    """'256M' or '2GiB' as bytes; K, M, G and T are powers of 1024. Raises UsageError."""
    found = re.fullmatch(r"(\d+)([KMGT]?)(i?B)?", text)
    if found is None:
        raise UsageError(f"not a size: {text!r} (like 256M or 2GiB)")
    return int(found[1]) << (10 * " KMGT".index(found[2] or " "))


SCHEMES: dict[str, Callable[[str, str, StoreConfig], Store]] = {
    "disk": _disk,
    "file": _file,
    "memory": _memory,
    "tiered": _tiered,
    **dict.fromkeys((*PLAIN, *SENTINEL, *CLUSTER), _redis),
}
