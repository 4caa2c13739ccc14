"""Sessions on a Redis or Valkey server (one, Sentinel or Cluster), for more than one machine.

    tenuto:{<tenant key>}:b:<blob id>   the blob, one value, with a time to live by its class
    tenuto:{<tenant key>}:ages          sorted set: blob id -> server time of its last put
    tenuto:{<tenant key>}:refs          hash: name -> sealed value, and '' -> since when it is there
    tenuto:{<tenant key>}:names         sorted set: the names of those, which a hash keeps in no order
    tenuto:{<tenant key>}:op:<token>    answer of one swap, kept for minutes
    tenuto:{<tenant key>}:version       b"1"

The braces put all keys of a tenant into one hash slot, so that scripts work in a Cluster too.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from redis.cluster import RedisCluster

from engine.errors import BlobMissing, IndexDamaged, StoreUnavailable, UnknownVersion
from serialization.blobs import (
    BlobClass,
    BlobId,
    BlobInfo,
    Bytes,
    StrayInfo,
    TierInfo,
    blob_class,
    blob_id,
    parse_blob_id,
    short,
    verify_blob,
)
from serialization.buffers import NEW, Buffers
from sessions.scratch import Seen
from sessions.stores import redis_scripts as scripts
from sessions.stores.base import (
    StoreConfig,
    check_blob_size,
    check_prefix,
    check_ref_name,
    check_refs,
    check_swap,
    seal,
    tenant_key,
    unseal,
    unseal_row,
)
from sessions.stores.redis_connect import CLIENT_ERRORS, connect, redis_error, with_replicas
from sessions.stores.redis_replicas import Replicas
from sessions.stores.retry import again

T = TypeVar("T")

VERSION = b"1"
_BATCH = 500
_OP_TTL = 10 * 60 * 1000  # milliseconds, far beyond the time that a swap is tried again
_ASIDE_TTL = 30 * 86400 * 1000


class RedisStore:
    """See `serialization.blobs.Store`. `usage` adds up names and values, not the server's overhead."""

    def __init__(
        self,
        url: str,
        tenant: str = "default",
        config: StoreConfig | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Connects. Raises UsageError, NameRefused, StoreUnavailable, UnknownVersion."""
        url, self._config = with_replicas(url, config or StoreConfig())
        self._tenant = tenant
        self._sleep = sleep
        self._prefix = f"tenuto:{{{tenant_key(tenant)}}}:"
        self._refs, self._ages = f"{self._prefix}refs", f"{self._prefix}ages"
        self._names = f"{self._prefix}names"
        self._replicas = Replicas(self._config, f"{self._prefix}wait")
        self._client: Any = connect(url, self._config)
        with _redis_errors():
            version = self._client.get(f"{self._prefix}version")
            if version is None:
                self._client.set(f"{self._prefix}version", VERSION, nx=True)
            elif version != VERSION:
                raise UnknownVersion(
                    f"this Redis store has version {version[:16]!r}; this build reads {VERSION!r}"
                )
        with contextlib.suppress(IndexDamaged), _redis_errors():  # `check` tells of that
            self._client.eval(scripts.SINCE, 1, self._refs)

    def __repr__(self) -> str:
        return f"RedisStore(tenant={self._tenant!r})"

    def put(self, cls: BlobClass, data: Bytes) -> BlobId:
        check_blob_size(memoryview(data).nbytes, self._config)
        blob = blob_id(cls, data)
        self.put_as(blob, data)
        return blob

    def put_as(self, blob: BlobId, data: Bytes) -> None:
        view = memoryview(data).cast("B")
        check_blob_size(view.nbytes, self._config)
        keys, ttl = (self._blob(parse_blob_id(blob)), self._ages), self._ttl(blob_class(blob))
        with _redis_errors():
            digest = hashlib.sha1(view, usedforsecurity=False).hexdigest()
            there = False
            while not there:
                if not self._client.eval(scripts.RENEW, 2, *keys, blob, ttl, digest):
                    self._client.eval(scripts.PUT, 2, *keys, blob, ttl, bytes(view))
                there = self._acknowledged(f"blob {short(blob)}")

    def get(self, blob: BlobId, buffers: Buffers = NEW) -> bytes:
        """Reading renews the blob's time to live, not its age."""
        key = self._blob(parse_blob_id(blob))
        ttl = self._ttl(blob_class(blob))
        with _redis_errors():
            pipe = self._client.pipeline(transaction=False)
            pipe.getrange(key, 0, self._config.max_blob)  # a byte too many tells one that is too large
            pipe.exists(key)
            if ttl:
                pipe.pexpire(key, ttl)
            data, exists, *_ = pipe.execute()
        if not data and not exists:
            raise BlobMissing(f"blob {short(blob)} is not in the store (any more)")
        check_blob_size(len(data), self._config)
        verify_blob(blob, data)
        return bytes(data)

    def get_anew(self, blob: BlobId) -> bytes:
        """Nothing here is a copy."""
        return self.get(blob)

    def has(self, blobs: Sequence[BlobId]) -> tuple[bool, ...]:
        keys = [self._blob(parse_blob_id(blob)) for blob in blobs]
        found = self._many("exists", [(key,) for key in keys])
        return tuple(bool(count) for count in found)

    def refresh(self, blobs: Sequence[BlobId]) -> None:
        """Renews their times to live, as reading them does."""
        ttls = [(self._blob(parse_blob_id(blob)), self._ttl(blob_class(blob))) for blob in blobs]
        self._many("pexpire", [(key, ttl) for key, ttl in ttls if ttl])

    def list_blobs(self) -> Iterator[BlobInfo]:
        """By SCAN, so that a lost or evicted set of ages hides nothing; a blob without one counts as new."""
        with Seen() as seen:
            for keys in self._scan(f"{self._blob(BlobId(''))}*"):
                blobs = [BlobId(key.decode().rpartition(":")[2]) for key in keys]
                blobs = [blob for blob in blobs if seen.add(blob)]
                yield from self._again(lambda blobs=blobs: self._infos(blobs))  # type: ignore[misc]

    def _infos(self, blobs: Sequence[BlobId]) -> list[BlobInfo]:
        """Of those that are there."""
        asked: list[tuple[str, ...]] = [(self._blob(blob),) for blob in blobs]
        sizes, there = self._many("strlen", asked), self._many("exists", asked)
        puts = self._many("zscore", [(self._ages, blob) for blob in blobs])
        now = self.now()
        return [
            BlobInfo(parse_blob_id(blob), nbytes, 0.0 if put is None else max(0.0, now - put))
            for blob, nbytes, exists, put in zip(blobs, sizes, there, puts, strict=True)
            if exists
        ]

    def delete_blob(self, blob: BlobId, older_than: float) -> bool:
        keys = (self._blob(parse_blob_id(blob)), self._ages)
        with _redis_errors():
            return bool(self._client.eval(scripts.DELETE, 2, *keys, blob, repr(float(older_than))))

    def list_stray(self) -> Iterator[StrayInfo]:
        """None: a value is written as a whole."""
        return iter(())

    def sweep(self, older_than: float) -> int:
        """Forgets the ages of blobs that expired; those are no strays and not counted."""
        oldest, cursor = self.now() - older_than, 0
        while True:
            with _redis_errors():
                cursor, aged = self._client.zscan(self._ages, cursor, count=_BATCH)
            old = [member for member, put in aged if put <= oldest]
            there = self._many("exists", [(f"{self._prefix}b:{member.decode()}",) for member in old])
            gone = [member for member, exists in zip(old, there, strict=True) if not exists]
            # DELETE looks once more, in one step with the removal: the blob may be back by now.
            self._many(
                "eval",
                [(scripts.DELETE, 2, f"{self._prefix}b:{m.decode()}", self._ages, m, "inf") for m in gone],
            )
            if cursor == 0:
                return 0

    def read(self, name: str) -> bytes | None:
        return self.read_many([name])[0]

    def read_many(self, names: Sequence[str]) -> tuple[bytes | None, ...]:
        for name in names:
            check_ref_name(name)
        if not names:
            return ()
        with _redis_errors():
            found = self._client.hmget(self._refs, list(names))
        return tuple(
            None if sealed is None else unseal(name, sealed)
            for name, sealed in zip(names, found, strict=True)
        )

    def list_refs(self, prefix: str) -> Iterator[tuple[str, bytes]]:
        check_prefix(prefix)
        return (unseal_row(*row) for row in self._rows(prefix))

    def last_refs(self, prefix: str, before: str | None, most: int) -> tuple[tuple[str, bytes], ...]:
        check_prefix(prefix)
        end = prefix + "\x7f" if before is None else min(before, prefix + "\x7f")
        rows = self._page(scripts.LAST, f"[{prefix}", f"({end}", most)
        return tuple(unseal_row(*row) for row in rows)

    def swap(
        self, name: str, old: bytes | None, new: bytes | None, guard: tuple[str, bytes] | None = None
    ) -> bool:
        """See `Store.swap`. After a lost answer it asks again by the same token, which never acts twice.

        If the server stays away, StoreUnavailable has `outcome="unknown"` among its details.
        """
        check_swap(name, old, new, guard, self._config.max_ref)
        sealed = ["" if value is None else seal(name, value) for value in (old, new)]
        against = ("", "") if guard is None else (guard[0], seal(*guard))
        keys = (self._refs, f"{self._prefix}op:{secrets.token_hex(16)}", self._names)
        while self._until_answered(
            lambda: bool(self._client.eval(scripts.SWAP, 3, *keys, _OP_TTL, name, *sealed, *against))
        ):
            if self._acknowledged(f"ref {name}"):
                return True
        self.read_many([name] if guard is None else [name, guard[0]])  # raises if damage made them differ
        return False

    def hint(self, refs: Mapping[str, bytes]) -> None:
        check_refs(refs, self._config.max_ref)
        if refs:
            given = [part for name, value in refs.items() for part in (name, seal(name, value))]
            with _redis_errors():
                self._client.eval(scripts.HINT, 2, self._refs, self._names, *given)

    @property
    def rows_expire(self) -> bool:
        return self._config.rows_ttl is not None

    def since(self) -> float | None:
        """Refs are lost by eviction, by a restart without persistence, or with a server that had none."""
        with _redis_errors():
            found = self._client.hget(self._refs, "")
        try:
            return float(found)
        except (TypeError, ValueError):  # nothing was set since they were lost
            return self.now()

    def now(self) -> float:
        seconds, micros = self._on_node(lambda node: node.time())
        return float(seconds) + float(micros) / 1e6

    def usage(self) -> int:
        """Of every key of this tenant, by SCAN: it is what is there, whatever expired or was evicted."""
        total, seen = 0, set[bytes]()
        for found in self._scan(f"{self._prefix}*"):
            keys = [key for key in dict.fromkeys(found) if key not in seen]
            seen.update(keys)
            kinds = self._many("type", [(key,) for key in keys])
            strings = [key for key, kind in zip(keys, kinds, strict=True) if kind == b"string"]
            total += sum(self._many("strlen", [(key,) for key in strings])) + sum(map(len, keys))
            total += sum(self._fields_nbytes(*each) for each in zip(keys, kinds, strict=True))
        return total

    def _fields_nbytes(self, key: bytes, kind: bytes) -> int:
        """Of what is in a hash or a sorted set."""
        with _redis_errors():
            if kind == b"hash":
                return sum(
                    len(name) + len(value) for name, value in self._client.hscan_iter(key, count=_BATCH)
                )
            if kind == b"zset":
                return sum(len(name) + 8 for name, _ in self._client.zscan_iter(key, count=_BATCH))
        return 0

    def tiers(self) -> tuple[TierInfo, ...]:
        return (TierInfo("redis", self.usage(), None),)

    def check_index(self) -> tuple[str, ...]:
        problems = []
        try:
            for row in self._rows(""):
                try:
                    unseal_row(*row)
                except IndexDamaged as error:
                    problems.append(str(error))
        except IndexDamaged as error:
            problems.append(str(error))
        memory = self._on_node(lambda node: node.info("memory"))
        if memory.get("maxmemory", 0) and str(memory.get("maxmemory_policy", "")).startswith("allkeys"):
            problems.append(
                "the server may evict refs and manifests: set its maxmemory-policy to volatile-lru"
            )
        return tuple(problems)

    def rebuild(self, refs: Mapping[str, bytes]) -> None:
        """The refs set aside stay for 30 days, under the key `…:aside:<time>`."""
        check_refs(refs, self._config.max_ref)
        aside = f"{self._prefix}aside:{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(4)}"
        given = [part for name, value in refs.items() for part in (name, seal(name, value))]
        with _redis_errors():
            self._client.eval(scripts.REBUILD, 3, self._refs, aside, self._names, _ASIDE_TTL, *given)
            self._acknowledge("the rebuilt refs")

    def scoped(self, session: str) -> RedisStore:
        return self

    def wipe(self) -> None:
        kept = f"{self._prefix}version".encode()
        for keys in self._scan(f"{self._prefix}*"):
            self._many("unlink", [(key,) for key in keys if key != kept])
        with _redis_errors():
            self._acknowledge("the wiped store")

    def close(self) -> None:
        with contextlib.suppress(*CLIENT_ERRORS):
            self._client.close()

    def _blob(self, blob: BlobId) -> str:
        return f"{self._prefix}b:{blob}"

    def _ttl(self, cls: BlobClass) -> int | str:
        ttl = self._config.ttl(cls)
        return "" if ttl is None else int(ttl * 1000)

    def _node(self) -> Any:
        """A plain client of the server that holds this tenant's keys."""
        if isinstance(self._client, RedisCluster):
            cluster: Any = self._client
            node = cluster.get_node_from_key(self._refs)
            if node is None:
                raise StoreUnavailable("no node of the Redis Cluster serves this tenant's slot")
            return cluster.get_redis_connection(node)
        return self._client

    def _on_node(self, ask: Callable[[Any], T]) -> T:
        """What one server is asked past the Cluster's client. Where that fails, it is looked up again who
        serves the slot, as the client does for commands of its own."""
        with _redis_errors():
            try:
                return ask(self._node())
            except CLIENT_ERRORS:
                if isinstance(self._client, RedisCluster):
                    with contextlib.suppress(*CLIENT_ERRORS):
                        self._client.nodes_manager.initialize()
                raise

    def _acknowledged(self, what: str) -> bool:
        """See `Replicas.acknowledged`."""
        return self._on_node(lambda node: self._replicas.acknowledged(node, what))

    def _acknowledge(self, what: str) -> None:
        """The same of what cannot be written twice. Raises StoreUnavailable."""
        if not self._acknowledged(what):
            raise StoreUnavailable(f"{what}: the server restarted meanwhile, or a replica took its place")

    def _until_answered(self, ask: Callable[[], bool]) -> bool:
        for attempt in range(self._config.attempts):
            if attempt:
                self._sleep(min(0.05 * 2**attempt, 2.0) * random.uniform(0.5, 1.0))
            try:
                with _redis_errors():
                    return ask()
            except StoreUnavailable as error:
                if error.details.get("permanent"):
                    raise
                last = error
        raise StoreUnavailable(
            f"{last}; it is not known whether the last write landed", outcome="unknown"
        ) from last

    def _many(self, command: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """One command with each of `arguments`, in one round trip per batch."""
        answers: list[Any] = []
        for start in range(0, len(arguments), _BATCH):
            with _redis_errors():
                pipe = self._client.pipeline(transaction=False)
                for given in arguments[start : start + _BATCH]:
                    getattr(pipe, command)(*given)
                answers += pipe.execute()
        return answers

    def _scan(self, pattern: str) -> Iterator[list[bytes]]:
        cursor = 0

        def step() -> tuple[int, list[bytes]]:
            found: tuple[int, list[bytes]] = self._on_node(
                lambda node: node.scan(cursor, match=pattern, count=_BATCH)
            )
            return found

        while True:
            cursor, keys = self._again(step)
            yield keys
            if cursor == 0:
                return

    def _rows(self, prefix: str) -> Iterator[tuple[bytes, bytes]]:
        """Name and sealed value of every ref that begins so, in order, as they came from the server."""
        first = b"[" + prefix.encode()
        while True:
            rows = self._page(scripts.FIRST, first, f"({prefix}\x7f" if prefix else "+", _BATCH)
            yield from rows
            if len(rows) < _BATCH:
                return
            first = b"(" + rows[-1][0]

    def _page(
        self, script: str, first: str | bytes, last: str | bytes, most: int
    ) -> list[tuple[bytes, bytes]]:
        def ask() -> list[bytes]:
            with _redis_errors():
                found: list[bytes] = self._client.eval(script, 2, self._refs, self._names, first, last, most)
                return found

        found = self._again(ask)
        return list(zip(found[::2], found[1::2], strict=True))

    def _again(self, ask: Callable[[], T]) -> T:
        """A step of a list, which nobody above can take again by itself."""
        return again(ask, self._config.attempts, sleep=self._sleep)


@contextlib.contextmanager
def _redis_errors() -> Iterator[None]:
    try:
        yield
    except CLIENT_ERRORS as error:
        raise redis_error(error) from error
