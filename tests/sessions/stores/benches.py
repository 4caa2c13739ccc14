"""For each kind of store: handles on one content, and ways to that content past the store."""

from __future__ import annotations

import os
import sqlite3
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from serialization.blobs import BlobClass, BlobId, Store, blob_class, blob_id
from serialization.sealed import BLOB_ROOM
from sessions.keyring.ciphers import Ciphers
from sessions.keyring.keyset import Scope
from sessions.keyring.master import MasterKeys
from sessions.keyring.ring import Keyring
from sessions.keyring.tenants import TenantKeys
from sessions.stores.base import StoreConfig, tenant_key
from sessions.stores.disk import DiskStore
from sessions.stores.memory import MemoryBacking, MemoryStore
from sessions.stores.redis import RedisStore
from sessions.stores.sealed import roomier
from sessions.stores.sealing import sealed_store
from tests.redis_server import RedisServer

SMALL = StoreConfig(max_blob=100_000)

#: Whose blobs are put where each session has keys of its own.
SESSION = "01ARZ3NDEKTSV4RRFFQ69G5FAV"


class Bench(ABC):
    """Raw access is to tenant 'default'."""

    #: By so much a stored blob is larger than what was put.
    room = 0

    def name(self, cls: BlobClass, data: bytes) -> BlobId:
        """What tenant 'default' calls a blob."""
        return blob_id(cls, data)

    def told(self, name: str) -> str:
        """What `check_index` calls a ref."""
        return name

    def __init__(self) -> None:
        self._opened: list[Store] = []

    def open(self, tenant: str = "default", config: StoreConfig = SMALL) -> Store:
        """One more handle, closed with the bench."""
        store = self.make(tenant, config)
        self._opened.append(store)
        return store

    def close(self) -> None:
        for store in self._opened:
            store.close()

    @abstractmethod
    def make(self, tenant: str, config: StoreConfig) -> Store: ...

    @abstractmethod
    def raw_blob(self, blob: BlobId) -> bytes: ...

    @abstractmethod
    def write_blob(self, blob: BlobId, data: bytes) -> None: ...

    @abstractmethod
    def remove_blob(self, blob: BlobId) -> None: ...

    @abstractmethod
    def age(self, blob: BlobId, seconds: float) -> None:
        """As if `blob` had been put `seconds` ago."""

    @abstractmethod
    def raw_ref(self, name: str) -> bytes: ...

    @abstractmethod
    def write_ref(self, name: str, sealed: bytes) -> None: ...


class MemoryBench(Bench):
    def __init__(self) -> None:
        super().__init__()
        self.backings: dict[str, MemoryBacking] = {}

    @property
    def held(self) -> MemoryBacking:
        return self.backings[tenant_key("default")]

    def make(self, tenant: str, config: StoreConfig) -> Store:
        return MemoryStore(self.backings, tenant, config)

    def raw_blob(self, blob: BlobId) -> bytes:
        return self.held.blobs[blob][0]

    def write_blob(self, blob: BlobId, data: bytes) -> None:
        self.held.blobs[blob] = (data, time.time())

    def remove_blob(self, blob: BlobId) -> None:
        del self.held.blobs[blob]

    def age(self, blob: BlobId, seconds: float) -> None:
        with self.held.lock:
            if blob in self.held.blobs:
                self.held.blobs[blob] = (self.held.blobs[blob][0], time.time() - seconds)

    def raw_ref(self, name: str) -> bytes:
        return self.held.refs[name]

    def write_ref(self, name: str, sealed: bytes) -> None:
        self.held.refs[name] = sealed


class DiskBench(Bench):
    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root

    @property
    def folder(self) -> Path:
        return self.root / "tenants" / tenant_key("default")

    @property
    def index(self) -> Path:
        return self.folder / "index.sqlite"

    def make(self, tenant: str, config: StoreConfig) -> Store:
        return DiskStore(self.root, tenant, config)

    def file(self, blob: BlobId) -> Path:
        digest = blob.rpartition("-")[2]
        name = digest if "-b3-" in blob else f"k3-{digest}"
        return self.folder / "blobs" / blob_class(blob) / digest[0] / name

    def raw_blob(self, blob: BlobId) -> bytes:
        return self.file(blob).read_bytes()

    def write_blob(self, blob: BlobId, data: bytes) -> None:
        self.file(blob).write_bytes(data)

    def remove_blob(self, blob: BlobId) -> None:
        self.file(blob).unlink()

    def age(self, blob: BlobId, seconds: float) -> None:
        then = time.time() - seconds
        try:
            os.utime(self.file(blob), (then, then))
        except FileNotFoundError:
            return

    def raw_ref(self, name: str) -> bytes:
        sealed: bytes = self._sql("SELECT sealed FROM refs WHERE name = ?", name)[0][0]
        return sealed

    def write_ref(self, name: str, sealed: bytes) -> None:
        self._sql("UPDATE refs SET sealed = ? WHERE name = ?", sealed, name)

    def _sql(self, statement: str, *values: Any) -> list[Any]:
        connection = sqlite3.connect(self.index)
        try:
            with connection:
                return connection.execute(statement, values).fetchall()
        finally:
            connection.close()


class RedisBench(Bench):
    def __init__(self, server: RedisServer, url: str | None = None) -> None:
        super().__init__()
        self.server = server
        self.url = url or server.url
        self.raw: Any = server.client()
        self.raw.flushall()
        self.prefix = f"tenuto:{{{tenant_key('default')}}}:"

    def close(self) -> None:
        super().close()
        self.raw.close()

    def make(self, tenant: str, config: StoreConfig) -> Store:
        return RedisStore(self.url, tenant, config)

    def key(self, blob: BlobId) -> str:
        return f"{self.prefix}b:{blob}"

    def raw_blob(self, blob: BlobId) -> bytes:
        data: bytes = self.raw.get(self.key(blob))
        return data

    def write_blob(self, blob: BlobId, data: bytes) -> None:
        self.raw.set(self.key(blob), data)

    def remove_blob(self, blob: BlobId) -> None:
        self.raw.delete(self.key(blob))

    def age(self, blob: BlobId, seconds: float) -> None:
        self.raw.zadd(f"{self.prefix}ages", {blob: time.time() - seconds}, xx=True)

    def raw_ref(self, name: str) -> bytes:
        sealed: bytes = self.raw.hget(f"{self.prefix}refs", name)
        return sealed

    def write_ref(self, name: str, sealed: bytes) -> None:
        self.raw.hset(f"{self.prefix}refs", name, sealed)


class SealedBench(Bench):
    """Any other bench with everything sealed on top. What is raw is what lies in the store beneath."""

    room = BLOB_ROOM

    def __init__(self, beneath: Bench, folder: Path, scope: Scope = Scope.TENANT) -> None:
        super().__init__()
        self.beneath = beneath
        self.keyring = Keyring(folder, MasterKeys([b"m" * 32]), scope)

    def close(self) -> None:
        super().close()
        self.beneath.close()

    def make(self, tenant: str, config: StoreConfig) -> Store:
        inner = self.beneath.make(tenant, roomier(config))
        return sealed_store(inner, self.keyring, tenant, config).scoped(SESSION)

    @property
    def keys(self) -> TenantKeys:
        """Of tenant 'default', made if there are none yet."""
        keys = self.keyring.tenant("default")
        keys.make(self.keyring.scope)
        return keys

    @property
    def ciphers(self) -> Ciphers:
        return self.keys.current()

    def name(self, cls: BlobClass, data: bytes) -> BlobId:
        session = SESSION if self.keyring.scope is Scope.SESSION else None
        with self.keys.writing(session) as ciphers:
            return ciphers.blob_id(cls, data)

    def told(self, name: str) -> str:
        return self.ciphers.ref_name(name)

    def raw_blob(self, blob: BlobId) -> bytes:
        return self.beneath.raw_blob(blob)

    def write_blob(self, blob: BlobId, data: bytes) -> None:
        self.beneath.write_blob(blob, data)

    def remove_blob(self, blob: BlobId) -> None:
        self.beneath.remove_blob(blob)

    def age(self, blob: BlobId, seconds: float) -> None:
        self.beneath.age(blob, seconds)

    def raw_ref(self, name: str) -> bytes:
        return self.beneath.raw_ref(self.ciphers.ref_name(name))

    def write_ref(self, name: str, sealed: bytes) -> None:
        self.beneath.write_ref(self.ciphers.ref_name(name), sealed)
