"""Memory over disk over Redis: quick tiers that may forget, over one last tier that holds the truth.

A put goes to the last tier first and is durable there before any other tier sees it. A get asks
from the top and fills the tiers above on its way back. Refs live in the last tier alone. What a
quick tier holds is only ever a copy: damage or loss there costs time, is remembered for
`check_index`, and never fails a call. A blob deleted by another machine may stay in our quick
tiers until room is needed; nothing refers to it.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from engine.errors import BlobMissing, ConfigError, TenutoError
from serialization.blobs import BlobClass, BlobId, BlobInfo, Bytes, Store, StrayInfo, TierInfo
from serialization.buffers import NEW, Buffers

_MAX_FAULTS = 100


class CacheTier:
    """A store that never holds more than `budget` bytes of ours, by its own `usage`, for long.

    The least recently used blobs go first. Every byte counts: `usage` includes the store's own
    index and folders' files, so a budget below that keeps nothing.
    """

    def __init__(self, store: Store, budget: int) -> None:
        if budget <= 0:
            raise ConfigError("a tier's byte budget must be above 0")
        self._store = store
        self._budget = budget
        self._lock = threading.Lock()
        self._sizes: OrderedDict[BlobId, int] = OrderedDict()  # least recently used first
        self._used = 0
        self.faults: list[str] = []
        with self._forgiving():
            self._count()

    def __repr__(self) -> str:
        return f"CacheTier({self._store!r}, budget={self._budget})"

    def get(self, blob: BlobId, buffers: Buffers = NEW) -> Bytes | None:
        """The bytes, verified; None if this tier does not have them or they are damaged here."""
        data: Bytes | None = None
        with self._lock, self._forgiving():
            data = self._get(blob, buffers)
        return data

    def put(self, blob: BlobId, data: Bytes) -> None:
        """Keeps a copy, making room for it first; one beyond the whole budget is not kept."""
        nbytes = memoryview(data).nbytes
        with self._lock, self._forgiving():
            if blob not in self._sizes:
                self._make_room(nbytes)
                if self._used + nbytes > self._budget:
                    return
                self._used += nbytes
                self._sizes[blob] = nbytes
            self._sizes.move_to_end(blob)
            self._store.put_as(blob, data)

    def delete(self, blob: BlobId) -> None:
        with self._lock, self._forgiving():
            self._evict(blob)

    def wipe(self) -> None:
        """Raises what the store raises: that copies stay behind is not forgiven."""
        with self._lock:
            self._store.wipe()
            self._count()

    def tiers(self) -> tuple[TierInfo, ...]:
        """What it occupies, and its budget; nothing where it cannot be asked."""
        told: tuple[TierInfo, ...] = ()
        with self._forgiving():
            told = tuple(replace(tier, budget=self._budget) for tier in self._store.tiers())
        return told

    def close(self) -> None:
        self._store.close()

    def _get(self, blob: BlobId, buffers: Buffers) -> Bytes | None:
        try:
            data = self._store.get(blob, buffers)
        except BlobMissing:
            self._used -= self._sizes.pop(blob, 0)
            return None
        except TenutoError:
            self._evict(blob)
            raise
        if blob not in self._sizes:  # put by another process
            self._used += len(data)
            self._sizes[blob] = len(data)
        self._sizes.move_to_end(blob)
        return data

    def _make_room(self, nbytes: int) -> None:
        if self._used + nbytes <= self._budget:
            return
        self._count()  # what other processes put or deleted here is known only now
        while self._sizes and self._used + nbytes > self._budget:
            self._evict(next(iter(self._sizes)))

    def _evict(self, blob: BlobId) -> None:
        self._used -= self._sizes.pop(blob, 0)
        self._store.delete_blob(blob, 0.0)

    def _count(self) -> None:
        """Takes the store's word for sizes; keeps our own order of use, others' blobs by age before it."""
        infos = {info.blob: info for info in sorted(self._store.list_blobs(), key=lambda info: -info.age)}
        ours = [blob for blob in self._sizes if blob in infos]
        others = [blob for blob in infos if blob not in self._sizes]
        self._sizes = OrderedDict((blob, infos[blob].nbytes) for blob in (*others, *ours))
        self._used = self._store.usage()

    @contextlib.contextmanager
    def _forgiving(self) -> Iterator[None]:
        try:
            yield
        except TenutoError as error:
            if len(self.faults) < _MAX_FAULTS:
                self.faults.append(f"cache tier: {error}")


class TieredStore:
    """See `serialization.blobs.Store`. `caches` from the quickest on; everything true is in `last`."""

    def __init__(self, caches: Sequence[CacheTier], last: Store) -> None:
        self._caches = tuple(caches)
        self._last = last

    def __repr__(self) -> str:
        return f"TieredStore({list(self._caches)!r}, {self._last!r})"

    def put(self, cls: BlobClass, data: Bytes) -> BlobId:
        blob = self._last.put(cls, data)
        self._fill(self._caches, blob, data)
        return blob

    def put_as(self, blob: BlobId, data: Bytes) -> None:
        self._last.put_as(blob, data)
        self._fill(self._caches, blob, data)

    def get(self, blob: BlobId, buffers: Buffers = NEW) -> Bytes:
        for depth, cache in enumerate(self._caches):
            data = cache.get(blob, buffers)
            if data is not None:
                self._fill(self._caches[:depth], blob, data)
                return data
        data = self._last.get(blob, buffers)
        self._fill(self._caches, blob, data)
        return data

    def get_anew(self, blob: BlobId) -> Bytes:
        for cache in self._caches:
            cache.delete(blob)
        data = self._last.get_anew(blob)
        self._fill(self._caches, blob, data)
        return data

    def has(self, blobs: Sequence[BlobId]) -> tuple[bool, ...]:
        return self._last.has(blobs)

    def refresh(self, blobs: Sequence[BlobId]) -> None:
        """In the last tier: what is read above it is not read there."""
        self._last.refresh(blobs)

    def list_blobs(self) -> Iterator[BlobInfo]:
        return self._last.list_blobs()

    def delete_blob(self, blob: BlobId, older_than: float) -> bool:
        gone = self._last.delete_blob(blob, older_than)
        if gone:
            for cache in self._caches:
                cache.delete(blob)
        return gone

    def list_stray(self) -> Iterator[StrayInfo]:
        return self._last.list_stray()

    def sweep(self, older_than: float) -> int:
        return self._last.sweep(older_than)

    def read(self, name: str) -> bytes | None:
        return self._last.read(name)

    def read_many(self, names: Sequence[str]) -> tuple[bytes | None, ...]:
        return self._last.read_many(names)

    def list_refs(self, prefix: str) -> Iterator[tuple[str, bytes]]:
        return self._last.list_refs(prefix)

    def last_refs(self, prefix: str, before: str | None, most: int) -> tuple[tuple[str, bytes], ...]:
        return self._last.last_refs(prefix, before, most)

    def swap(
        self, name: str, old: bytes | None, new: bytes | None, guard: tuple[str, bytes] | None = None
    ) -> bool:
        return self._last.swap(name, old, new, guard)

    def hint(self, refs: Mapping[str, bytes]) -> None:
        self._last.hint(refs)

    @property
    def rows_expire(self) -> bool:
        return self._last.rows_expire

    def since(self) -> float | None:
        return self._last.since()

    def now(self) -> float:
        return self._last.now()

    def usage(self) -> int:
        """Of the last tier; the others have budgets."""
        return self._last.usage()

    def tiers(self) -> tuple[TierInfo, ...]:
        quick = (tier for cache in self._caches for tier in cache.tiers())
        return (*quick, *self._last.tiers())

    def check_index(self) -> tuple[str, ...]:
        faults = [fault for cache in self._caches for fault in cache.faults]
        return (*self._last.check_index(), *faults)

    def rebuild(self, refs: Mapping[str, bytes]) -> None:
        self._last.rebuild(refs)

    def scoped(self, session: str) -> TieredStore:
        return self

    def wipe(self) -> None:
        for wipe in (self._last.wipe, *(cache.wipe for cache in self._caches)):
            wipe()

    def close(self) -> None:
        for close in (*(cache.close for cache in self._caches), self._last.close):
            close()

    @staticmethod
    def _fill(caches: Sequence[CacheTier], blob: BlobId, data: Bytes) -> None:
        for cache in caches:
            cache.put(blob, data)
