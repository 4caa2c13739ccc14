"""A store in this process's memory, for tests and as the first tier over another store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest

from engine.errors import BlobMissing, IndexDamaged
from serialization.blobs import (
    BlobClass,
    BlobId,
    BlobInfo,
    Bytes,
    StrayInfo,
    TierInfo,
    blob_id,
    parse_blob_id,
    short,
    verify_blob,
)
from serialization.buffers import NEW, Buffers
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
)


@dataclass(slots=True)
class MemoryBacking:
    """What one tenant's handles share: blobs as (bytes, time of the last put), refs as sealed values."""

    blobs: dict[BlobId, tuple[bytes, float]] = field(default_factory=dict)
    refs: dict[str, bytes] = field(default_factory=dict)
    aside: list[dict[str, bytes]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class MemoryStore:
    """See `serialization.blobs.Store`. Several handles over the same `backings` see the same content."""

    def __init__(
        self,
        backings: dict[str, MemoryBacking] | None = None,
        tenant: str = "default",
        config: StoreConfig | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config or StoreConfig()
        self._clock = clock
        self._tenant = tenant
        shared = {} if backings is None else backings
        self._held = shared.setdefault(tenant_key(tenant), MemoryBacking())

    def __repr__(self) -> str:
        return f"MemoryStore(tenant={self._tenant!r})"

    def put(self, cls: BlobClass, data: Bytes) -> BlobId:
        check_blob_size(memoryview(data).nbytes, self._config)
        blob = blob_id(cls, data)
        self.put_as(blob, data)
        return blob

    def put_as(self, blob: BlobId, data: Bytes) -> None:
        check_blob_size(memoryview(data).nbytes, self._config)
        parse_blob_id(blob)
        kept = bytes(data)
        with self._held.lock:
            self._held.blobs[blob] = (kept, self._clock())

    def get(self, blob: BlobId, buffers: Buffers = NEW) -> bytes:
        parse_blob_id(blob)
        with self._held.lock:
            found = self._held.blobs.get(blob)
        if found is None:
            raise BlobMissing(f"blob {short(blob)} is not in the store")
        check_blob_size(len(found[0]), self._config)
        verify_blob(blob, found[0])
        return found[0]

    def get_anew(self, blob: BlobId) -> bytes:
        """Nothing here is a copy."""
        return self.get(blob)

    def has(self, blobs: Sequence[BlobId]) -> tuple[bool, ...]:
        for blob in blobs:
            parse_blob_id(blob)
        with self._held.lock:
            return tuple(blob in self._held.blobs for blob in blobs)

    def refresh(self, blobs: Sequence[BlobId]) -> None:
        """Nothing vanishes by age here."""
        for blob in blobs:
            parse_blob_id(blob)

    def list_blobs(self) -> Iterator[BlobInfo]:
        with self._held.lock:
            now = self._clock()
            found = [
                BlobInfo(blob, len(data), max(0.0, now - then))
                for blob, (data, then) in self._held.blobs.items()
            ]
        return iter(found)

    def delete_blob(self, blob: BlobId, older_than: float) -> bool:
        parse_blob_id(blob)
        with self._held.lock:
            found = self._held.blobs.get(blob)
            if found is None or max(0.0, self._clock() - found[1]) < older_than:
                return False
            del self._held.blobs[blob]
            return True

    def list_stray(self) -> Iterator[StrayInfo]:
        return iter(())

    def sweep(self, older_than: float) -> int:
        return 0

    def read(self, name: str) -> bytes | None:
        return self.read_many([name])[0]

    def read_many(self, names: Sequence[str]) -> tuple[bytes | None, ...]:
        for name in names:
            check_ref_name(name)
        with self._held.lock:
            return tuple(self._value(name) for name in names)

    def list_refs(self, prefix: str) -> Iterator[tuple[str, bytes]]:
        check_prefix(prefix)
        with self._held.lock:
            names = sorted(name for name in self._held.refs if name.startswith(prefix))
            found = [(name, unseal(name, self._held.refs[name])) for name in names]
        return iter(found)

    def last_refs(self, prefix: str, before: str | None, most: int) -> tuple[tuple[str, bytes], ...]:
        check_prefix(prefix)
        with self._held.lock:
            names = [name for name in self._held.refs if name.startswith(prefix)]
            if before is not None:
                names = [name for name in names if name < before]
            return tuple((name, unseal(name, self._held.refs[name])) for name in nlargest(most, names))

    def swap(
        self, name: str, old: bytes | None, new: bytes | None, guard: tuple[str, bytes] | None = None
    ) -> bool:
        check_swap(name, old, new, guard, self._config.max_ref)
        with self._held.lock:
            if self._value(name) != old or (guard is not None and self._value(guard[0]) != guard[1]):
                return False
            if new is not None:
                self._held.refs[name] = seal(name, new)
            elif old is not None:
                del self._held.refs[name]
            return True

    def hint(self, refs: Mapping[str, bytes]) -> None:
        check_refs(refs, self._config.max_ref)
        with self._held.lock:
            self._held.refs.update((name, seal(name, value)) for name, value in refs.items())

    @property
    def rows_expire(self) -> bool:
        return False

    def since(self) -> float | None:
        return None

    def now(self) -> float:
        return self._clock()

    def usage(self) -> int:
        with self._held.lock:
            blobs = sum(len(data) for data, _ in self._held.blobs.values())
            kept = (self._held.refs, *self._held.aside)
            refs = sum(len(name) + len(sealed) for each in kept for name, sealed in each.items())
        return blobs + refs

    def tiers(self) -> tuple[TierInfo, ...]:
        return (TierInfo("memory", self.usage(), None),)

    def check_index(self) -> tuple[str, ...]:
        problems = []
        with self._held.lock:
            for name, sealed in self._held.refs.items():
                try:
                    unseal(name, sealed)
                except IndexDamaged as error:
                    problems.append(str(error))
        return tuple(problems)

    def rebuild(self, refs: Mapping[str, bytes]) -> None:
        check_refs(refs, self._config.max_ref)
        with self._held.lock:
            self._held.aside.append(dict(self._held.refs))
            self._held.refs.clear()
            self._held.refs.update((name, seal(name, value)) for name, value in refs.items())

    def scoped(self, session: str) -> MemoryStore:
        return self

    def wipe(self) -> None:
        with self._held.lock:
            for held in (self._held.blobs, self._held.refs, self._held.aside):
                held.clear()

    def close(self) -> None:
        """Nothing to close: the content lives as long as its backing."""

    def _value(self, name: str) -> bytes | None:
        sealed = self._held.refs.get(name)
        return None if sealed is None else unseal(name, sealed)
