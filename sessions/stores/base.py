"""What every store shares: its settings, the names it takes, and the seal on each ref."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from engine.errors import ConfigError, IndexDamaged, LimitExceeded, NameRefused
from serialization.blobs import BlobClass, Bytes
from serialization.manifest import TENANT

MAX_REF_NAME = 512
MAX_WORD = 128
MAX_REF_NBYTES = 64 * 1024
SEAL_NBYTES = 32

_WORD = re.compile(rf"[A-Za-z0-9._-]{{1,{MAX_WORD}}}")
_PREFIX = re.compile(rf"[A-Za-z0-9._/-]{{0,{MAX_REF_NAME}}}")
_DAY = 86400.0


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Limits in bytes, times in seconds. Retention times matter to Redis alone; None keeps for ever."""

    max_blob: int = 64 * 1024 * 1024
    max_ref: int = MAX_REF_NBYTES
    busy_timeout: float = 30.0  # how long a ref waits for other processes (disk)
    connect_timeout: float = 5.0
    reply_timeout: float = 30.0
    replica_timeout: float = 5.0  # how long a write waits for a replica, where there is one
    rows_ttl: float | None = 30 * _DAY  # rows and points, counted from their last use
    manifest_ttl: float | None = None
    replicas: int | None = None  # that must have each write; None: one, where the server has any
    attempts: int = 5  # of a read or put, while the store cannot be reached

    def __post_init__(self) -> None:
        for name in (
            "max_blob",
            "max_ref",
            "busy_timeout",
            "connect_timeout",
            "reply_timeout",
            "replica_timeout",
            "attempts",
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(f"store setting {name} must be above 0")
        if self.replica_timeout >= self.reply_timeout:
            raise ConfigError("store setting replica_timeout must be below reply_timeout, which covers it")
        for name, ttl in (("rows_ttl", self.rows_ttl), ("manifest_ttl", self.manifest_ttl)):
            if ttl is not None and ttl < 1:
                raise ConfigError(f"store setting {name} must be at least a second")

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> StoreConfig:
        """Raises ConfigError for a key that is no setting, by name."""
        known = {field.name for field in dataclasses.fields(cls)}
        for key in settings:
            if key not in known:
                raise ConfigError(f"unknown store setting {key!r} (known: {', '.join(sorted(known))})")
        return cls(**settings)

    def ttl(self, cls: BlobClass) -> float | None:
        """How long a blob of this class stays after its last use."""
        return self.manifest_ttl if cls is BlobClass.MANIFEST else self.rows_ttl


def check_tenant(tenant: str) -> None:
    """Raises NameRefused unless a manifest may have `tenant`: 1 to 64 of [A-Za-z0-9._-], a letter or a digit
    first."""
    if not TENANT.fullmatch(tenant):
        raise NameRefused(
            f"not a tenant name: {tenant[:40]!r} (1 to 64 of A-Z a-z 0-9 . _ -, a letter or a digit first)"
        )


def tenant_key(tenant: str) -> str:
    """32 hex digits that stand for a tenant in paths and keys, since names from outside never do."""
    check_tenant(tenant)
    return blake3(b"tenuto tenant\0" + tenant.encode()).hexdigest(length=16)


def check_ref_name(name: str) -> None:
    """Raises NameRefused unless `name` is '/'-separated words of [A-Za-z0-9._-], none '.' or '..'."""
    words = name.split("/")
    if len(name) > MAX_REF_NAME or not all(
        _WORD.fullmatch(word) and word not in (".", "..") for word in words
    ):
        raise NameRefused(f"not a ref name: {name[:40]!r} (words of A-Z a-z 0-9 . _ - between slashes)")


def check_prefix(prefix: str) -> None:
    """Raises NameRefused where no ref name can start with `prefix`."""
    if not _PREFIX.fullmatch(prefix):
        raise NameRefused(f"not the start of a ref name: {prefix[:40]!r}")


def check_swap(
    name: str,
    old: bytes | None,
    new: bytes | None,
    guard: tuple[str, bytes] | None,
    max_nbytes: int = MAX_REF_NBYTES,
) -> None:
    """Raises NameRefused or LimitExceeded before a swap touches anything."""
    check_ref_name(name)
    if guard is not None:
        check_ref_name(guard[0])
    for value in (old, new, None if guard is None else guard[1]):
        if value is not None and len(value) > max_nbytes:
            raise LimitExceeded(f"ref {name}: {len(value):,} bytes, at most {max_nbytes:,} are allowed")


def check_refs(refs: Mapping[str, bytes], max_nbytes: int = MAX_REF_NBYTES) -> None:
    """Raises NameRefused or LimitExceeded for any of `refs`."""
    for name, value in refs.items():
        check_swap(name, None, value, None, max_nbytes)


def check_blob_size(nbytes: int, config: StoreConfig) -> None:
    """Raises LimitExceeded for a blob beyond the limit, before any room is made for it."""
    if nbytes > config.max_blob:
        raise LimitExceeded(f"a blob of {nbytes:,} bytes, at most {config.max_blob:,} are allowed")


def seal(name: str, value: Bytes) -> bytes:
    """What a store keeps for a ref: 32 bytes of BLAKE3 over name, NUL and value; then the value."""
    return blake3(name.encode() + b"\0" + bytes(value)).digest(length=SEAL_NBYTES) + bytes(value)


def unseal(name: str, sealed: object) -> bytes:
    """The value of a kept ref. Raises IndexDamaged unless it is what was written under this name."""
    if (
        not isinstance(sealed, bytes)
        or len(sealed) < SEAL_NBYTES
        or seal(name, sealed[SEAL_NBYTES:]) != sealed
    ):
        raise IndexDamaged(
            f"ref {name[:80]}: the index does not hold what was written (check --repair rebuilds it)"
        )
    return sealed[SEAL_NBYTES:]


def unseal_row(name: object, sealed: object) -> tuple[str, bytes]:
    """Name and value of a listed ref, both as they came from the index. Raises IndexDamaged."""
    text = printable(name)
    try:
        check_ref_name(text)
    except NameRefused:
        raise IndexDamaged(
            f"the index holds a damaged name: {text[:40]!r} (check --repair rebuilds it)"
        ) from None
    return text, unseal(text, sealed)


def printable(text: object) -> str:
    """One line for people of what should be text, whatever bytes a damaged file put there."""
    if isinstance(text, str):
        text = text.encode("utf-8", "surrogateescape")
    if not isinstance(text, bytes):
        return repr(text)
    return b" ".join(text.split()).decode("latin-1").encode("unicode_escape").decode("ascii")
