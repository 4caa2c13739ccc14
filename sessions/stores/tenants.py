"""Which tenants have something in a store: told by digests, since their names are not stored."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from engine.errors import UsageError
from sessions.stores.base import StoreConfig
from sessions.stores.disk import TENANTS
from sessions.stores.folder import disk_errors
from sessions.stores.open import without_tiers
from sessions.stores.redis_connect import (
    CLIENT_ERRORS,
    CLUSTER,
    PLAIN,
    SENTINEL,
    connect,
    redis_error,
    with_replicas,
)


def stored_tenants(url: str) -> frozenset[str]:
    """The digests of tenants (see `base.tenant_key`) that the store at `url` has anything of. Makes nothing,
    not even the store. Raises UsageError for one that cannot tell, StoreUnavailable."""
    url = without_tiers(url)
    scheme = url.partition(":")[0]
    if scheme in (*PLAIN, *SENTINEL, *CLUSTER):
        return _in_redis(url)
    if scheme == "file":
        return _in_folder(unquote(urlsplit(url).path))
    if scheme == "disk":
        return _in_folder(url.removeprefix("disk:"))
    if ":" not in url.partition("/")[0]:
        return _in_folder(url)
    raise UsageError(f"which tenants a store of the kind {scheme}: has is not known; say --tenant")


def _in_folder(root: str) -> frozenset[str]:
    folder = Path(root).expanduser() / TENANTS
    with disk_errors(f"listing the tenants in {root}"):
        return frozenset(os.listdir(folder)) if folder.is_dir() else frozenset()


def _in_redis(url: str) -> frozenset[str]:
    try:
        client: Any = connect(*with_replicas(url, StoreConfig()))
        with contextlib.closing(client):
            keys = list(client.scan_iter(match="tenuto:{*}:version", count=500))
    except CLIENT_ERRORS as error:
        raise redis_error(error) from error
    return frozenset(key.decode().split("{")[1].split("}")[0] for key in keys)
