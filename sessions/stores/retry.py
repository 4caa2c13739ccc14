"""A store that tries again while the one beneath cannot be reached."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import TypeVar

from engine.errors import StoreUnavailable
from serialization.blobs import BlobClass, BlobId, BlobInfo, Bytes, Store, StrayInfo, TierInfo
from serialization.buffers import NEW, Buffers

T = TypeVar("T")


def again(
    act: Callable[[], T],
    attempts: int,
    first: float = 0.05,
    ceiling: float = 2.0,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """What `act` returns. While it raises StoreUnavailable it is called anew, at most `attempts` times: after
    `first` seconds, then after twice as long each time up to `ceiling`, each wait shortened by a random part
    of up to a half so that many clients do not come at once. An error with `permanent` among its details is
    not tried again."""
    for attempt in range(attempts - 1):
        try:
            return act()
        except StoreUnavailable as error:
            if error.details.get("permanent"):
                raise
            sleep(min(first * 2**attempt, ceiling) * random.uniform(0.5, 1.0))
    return act()


class RetryingStore:
    """Repeats what may be repeated: everything but `swap` and `rebuild`.

    A swap whose answer was lost may have taken effect, and only the store beneath can find out.
    A repeated delete may answer False for a blob that its first attempt did delete. Lists are begun
    again; in the midst of one the store beneath takes its steps again itself.
    """

    def __init__(
        self,
        store: Store,
        attempts: int = 5,
        first: float = 0.05,
        ceiling: float = 2.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """See `again`."""
        self._store = store
        self._attempts = attempts
        self._first = first
        self._ceiling = ceiling
        self._sleep = sleep

    def __repr__(self) -> str:
        return f"RetryingStore({self._store!r})"

    def put(self, cls: BlobClass, data: Bytes) -> BlobId:
        return self._try(lambda: self._store.put(cls, data))

    def put_as(self, blob: BlobId, data: Bytes) -> None:
        self._try(lambda: self._store.put_as(blob, data))

    def get(self, blob: BlobId, buffers: Buffers = NEW) -> Bytes:
        return self._try(lambda: self._store.get(blob, buffers))

    def get_anew(self, blob: BlobId) -> Bytes:
        return self._try(lambda: self._store.get_anew(blob))

    def has(self, blobs: Sequence[BlobId]) -> tuple[bool, ...]:
        return self._try(lambda: self._store.has(blobs))

    def refresh(self, blobs: Sequence[BlobId]) -> None:
        self._try(lambda: self._store.refresh(blobs))

    def list_blobs(self) -> Iterator[BlobInfo]:
        return self._begun(self._store.list_blobs)

    def delete_blob(self, blob: BlobId, older_than: float) -> bool:
        return self._try(lambda: self._store.delete_blob(blob, older_than))

    def list_stray(self) -> Iterator[StrayInfo]:
        return self._begun(self._store.list_stray)

    def sweep(self, older_than: float) -> int:
        return self._try(lambda: self._store.sweep(older_than))

    def read(self, name: str) -> bytes | None:
        return self._try(lambda: self._store.read(name))

    def read_many(self, names: Sequence[str]) -> tuple[bytes | None, ...]:
        return self._try(lambda: self._store.read_many(names))

    def list_refs(self, prefix: str) -> Iterator[tuple[str, bytes]]:
        return self._begun(lambda: self._store.list_refs(prefix))

    def last_refs(self, prefix: str, before: str | None, most: int) -> tuple[tuple[str, bytes], ...]:
        return self._try(lambda: self._store.last_refs(prefix, before, most))

    def swap(
        self, name: str, old: bytes | None, new: bytes | None, guard: tuple[str, bytes] | None = None
    ) -> bool:
        return self._store.swap(name, old, new, guard)

    def hint(self, refs: Mapping[str, bytes]) -> None:
        self._try(lambda: self._store.hint(refs))

    @property
    def rows_expire(self) -> bool:
        return self._store.rows_expire

    def since(self) -> float | None:
        return self._try(self._store.since)

    def now(self) -> float:
        return self._try(self._store.now)

    def usage(self) -> int:
        return self._try(self._store.usage)

    def tiers(self) -> tuple[TierInfo, ...]:
        return self._try(self._store.tiers)

    def check_index(self) -> tuple[str, ...]:
        return self._try(self._store.check_index)

    def rebuild(self, refs: Mapping[str, bytes]) -> None:
        self._store.rebuild(refs)

    def scoped(self, session: str) -> Store:
        own = self._store.scoped(session)
        if own is self._store:
            return self
        return RetryingStore(own, self._attempts, self._first, self._ceiling, self._sleep)

    def wipe(self) -> None:
        self._try(self._store.wipe)

    def close(self) -> None:
        self._store.close()

    def _try(self, act: Callable[[], T]) -> T:
        return again(act, self._attempts, self._first, self._ceiling, self._sleep)

    def _begun(self, make: Callable[[], Iterator[T]]) -> Iterator[T]:
        def begin() -> Iterator[T]:
            items = make()
            return chain(list(islice(items, 1)), items)

        return self._try(begin)
