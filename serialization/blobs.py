"""Where bytes live: immutable blobs named by their digest, and tiny refs that a swap moves.

`Store` is defined here, where its callers are, and implemented in `sessions/stores`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NewType, Protocol

from blake3 import blake3

from engine.errors import Corrupt, UnknownFeature

if TYPE_CHECKING:  # the command line tells its help without numpy
    from serialization.buffers import Buffers

#: "<class>-<digest's kind>-<64 hex>": the class says how long to keep it, "b3" that the digest is BLAKE3-256
#: of the stored bytes, "k3" that they are sealed and it is a keyed one of what they were before.
BlobId = NewType("BlobId", str)

Bytes = bytes | bytearray | memoryview

#: A sealed blob ends with so many bytes of BLAKE3 over its name and all before, for who has no key.
CHECKSUM_NBYTES = 32

_BLOB_ID = re.compile(r"(rows|point|manifest)-(b3|k3)-[0-9a-f]{64}")


class BlobClass(StrEnum):
    """What a blob is for, which decides its retention: rows are a cache, manifests are not."""

    ROWS = "rows"
    POINT = "point"
    MANIFEST = "manifest"


def blob_id(cls: BlobClass, data: Bytes) -> BlobId:
    """The name of `data`: a digest of the stored (encoded) bytes."""
    return BlobId(f"{cls}-b3-{blake3(data).hexdigest()}")


def parse_blob_id(text: str) -> BlobId:
    """`text` as a blob id. Raises Corrupt when it is none, UnknownFeature for another digest."""
    if _BLOB_ID.fullmatch(text):
        return BlobId(text)
    if re.fullmatch(r"[a-z]+-[a-z0-9]+-[0-9a-f]{32,128}", text):
        raise UnknownFeature(f"blob id of an unknown class or digest: {text[:24]}…")
    raise Corrupt(f"not a blob id: {text[:40]!r}")


def blob_class(blob: BlobId) -> BlobClass:
    return BlobClass(blob.partition("-")[0])


def is_sealed(blob: BlobId) -> bool:
    """Whether the name is of a blob that was enciphered (docs/format.md, section 11)."""
    return blob.split("-")[1] == "k3"


def checksum(blob: BlobId, *pieces: Bytes) -> bytes:
    """How a sealed blob ends whose bytes before are `pieces`."""
    digest = blake3(blob.encode() + b"\0")
    for piece in pieces:
        digest.update(piece)
    return digest.digest(length=CHECKSUM_NBYTES)


def verify_blob(blob: BlobId, data: Bytes) -> None:
    """Raises Corrupt unless `data` is what `blob` names; of a sealed one, unless it is as it was written."""
    if is_sealed(blob):
        view = memoryview(data)
        sound = view[-CHECKSUM_NBYTES:] == checksum(blob, view[:-CHECKSUM_NBYTES])
    else:
        sound = blob_id(blob_class(blob), data) == blob
    if not sound:
        raise Corrupt(f"blob {short(blob)}: the stored bytes are not those that were written")


def short(blob: BlobId) -> str:
    """A blob id for people."""
    cls, _, digest = blob.split("-")
    return f"{cls}-{digest[:12]}"


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """One stored blob: `nbytes` as stored, `age` in seconds since it was last put."""

    blob: BlobId
    nbytes: int
    age: float


@dataclass(frozen=True, slots=True)
class StrayInfo:
    """A leftover of a write that never finished: no blob id names it, and nothing reads it."""

    name: str
    nbytes: int
    age: float


@dataclass(frozen=True, slots=True)
class TierInfo:
    """One tier of a store: `kind` is memory, disk or redis, `nbytes` what it occupies for this tenant, and
    `budget` how much that may be, None for the tier that holds the truth."""

    kind: str
    nbytes: int
    budget: int | None


class Store(Protocol):
    """Blobs and refs of one tenant.

    Blobs are immutable and named by their bytes, or where they are sealed by a keyed digest of what they
    were before: then equal names mean equal contents, and the bytes may be replaced by others that say the
    same. Refs are small named values (at most 64 KiB) and
    `swap` is the only commit: all blobs that a ref's value names are put before it. Names of refs are
    '/'-separated words of [A-Za-z0-9._-]; a store never turns them into paths.
    """

    def put(self, cls: BlobClass, data: Bytes) -> BlobId:
        """Store `data` durably, or renew the age of the same blob if it is there already.

        Raises StoreFull, StoreUnavailable. After an error no partial blob is visible.
        """
        ...

    def put_as(self, blob: BlobId, data: Bytes) -> None:
        """`put` under the name `blob`, which the caller made for `data`; it replaces what is there."""
        ...

    def get(self, blob: BlobId, buffers: Buffers = ...) -> Bytes:
        """The bytes of `blob`, digest verified; in memory of `buffers` where the store reads them itself.
        Raises BlobMissing, Corrupt, StoreUnavailable."""
        ...

    def get_anew(self, blob: BlobId) -> Bytes:
        """`get` of what was put last, where there may be quick copies of what another process replaced since
        (a sealed blob, sealed anew); those copies are forgotten."""
        ...

    def has(self, blobs: Sequence[BlobId]) -> tuple[bool, ...]:
        """Which of `blobs` are there now. A hint: no save relies on it alone."""
        ...

    def refresh(self, blobs: Sequence[BlobId]) -> None:
        """Count `blobs` as used now where they vanish by age (`rows_expire`); those that are gone are no
        matter. The age that `delete_blob` compares is that of the last put, as before."""
        ...

    def list_blobs(self) -> Iterator[BlobInfo]:
        """Every blob that is there all the while once, in any order; read on as it is asked for."""
        ...

    def delete_blob(self, blob: BlobId, older_than: float) -> bool:
        """Delete `blob` if it is `older_than` seconds old or more, atomically. True if this took it away."""
        ...

    def list_stray(self) -> Iterator[StrayInfo]:
        """What crashed writes left behind."""
        ...

    def sweep(self, older_than: float) -> int:
        """Delete the strays whose age is at least `older_than` seconds. Returns how many."""
        ...

    def read(self, name: str) -> bytes | None:
        """The value of a ref, or None. Raises IndexDamaged, StoreUnavailable."""
        ...

    def read_many(self, names: Sequence[str]) -> tuple[bytes | None, ...]: ...

    def list_refs(self, prefix: str) -> Iterator[tuple[str, bytes]]:
        """(name, value) of every ref whose name starts with `prefix`, in an order of the store's own.

        Read on as it is asked for: what is there all the while comes once, and of what is set or deleted
        meanwhile nothing is promised.
        """
        ...

    def last_refs(self, prefix: str, before: str | None, most: int) -> tuple[tuple[str, bytes], ...]:
        """Of those at most `most`, from the last one on, back; with `before` of those that sort before it."""
        ...

    def swap(
        self, name: str, old: bytes | None, new: bytes | None, guard: tuple[str, bytes] | None = None
    ) -> bool:
        """Set ref `name` to `new` if it is `old` now (None: absent); durable when it returns.

        With `guard` = (other name, value), only while that ref has that value, in the same atomic step.
        False, and nothing changed, when either comparison fails.
        """
        ...

    def hint(self, refs: Mapping[str, bytes]) -> None:
        """Set refs without comparing, in one step: for hints (the prefix index) whose loss harms nothing.

        Need not be durable when it returns.
        """
        ...

    @property
    def rows_expire(self) -> bool:
        """Whether rows may vanish by age here, so that a missing one is a miss and not damage."""
        ...

    def since(self) -> float | None:
        """Since when all refs that were set are here, by `now`: what is older may be lost. None where the
        store loses nothing by itself."""
        ...

    def now(self) -> float:
        """Seconds since the epoch by the store's own clock, so that leases agree between machines."""
        ...

    def usage(self) -> int:
        """Bytes that the store occupies for this tenant: blobs, refs and index."""
        ...

    def tiers(self) -> tuple[TierInfo, ...]:
        """What each tier occupies, the quickest first; the last one is that of `usage`."""
        ...

    def check_index(self) -> tuple[str, ...]:
        """Problems of the store's own index, a line each; empty when it is sound."""
        ...

    def rebuild(self, refs: Mapping[str, bytes]) -> None:
        """Replace every ref of this tenant by `refs`. A damaged index is set aside, not deleted.

        Blobs can be listed and read while the index is damaged.
        """
        ...

    def scoped(self, session: str) -> Store:
        """Where blobs that belong to one session are put: this very store, unless sessions have keys of their
        own, so that each has its own copy of what is equal. Anything can be read from either."""
        ...

    def wipe(self) -> None:
        """Delete all there is of this tenant: blobs of any age, refs, strays, and what was set aside. Nobody
        may be writing; the store can be used on, empty."""
        ...

    def close(self) -> None: ...
