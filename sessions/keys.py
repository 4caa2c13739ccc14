"""API keys: who comes with one is its tenant. The keys themselves are stored nowhere, only digests of them.

A key is 256 random bits, so its digest is made by one fast hash: there is nothing to guess. They lie in one
small file apart from every store, and a running process sees at its next look what was made or revoked.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import re
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from engine.errors import Corrupt, KeyFileRefused, KeyRefused
from serialization.canonical import pack, unpack
from serialization.records import Record, real, text
from sessions.keyring.framing import framed, unframed
from sessions.keyring.private import Signature, read_private, replace_private, signature
from sessions.stores.base import check_tenant
from sessions.stores.folder import disk_errors, locked, make_folders, opened_folder

API_KEYS = "api-keys"
MAX_KEYS = 2**16

_ID_NBYTES = 8
_SECRET_NBYTES = 32
_DIGEST_NBYTES = 32
_TEXT = re.compile(r"tnt_([a-z2-7]{13})_([a-z2-7]{52})")
_LONGEST_TEXT = 256
_CONTEXT = "tenuto API keys, version 1"

#: What a key that is not there is compared with, so that it takes as long as one that is.
_NOBODY = secrets.token_bytes(_DIGEST_NBYTES)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What is kept of a key: `id` is a part of its text and no secret, `created` in seconds since 1970."""

    id: str
    tenant: str
    created: float
    digest: bytes = field(repr=False)


class ApiKeys:
    """The API keys in FOLDER/api-keys. Safe from many threads and processes."""

    def __init__(self, folder: Path) -> None:
        """Reads nothing yet; a folder that is not there has no keys."""
        self._folder = folder
        self._file = folder / API_KEYS
        self._lock = threading.Lock()
        self._at_hand: tuple[Signature | None, dict[str, ApiKey]] = (None, {})

    def __repr__(self) -> str:
        return f"ApiKeys({str(self._folder)!r})"

    def find(self, text: str) -> ApiKey:
        """The key whose text this is. Raises KeyRefused, which tells nothing of why; KeyFileRefused."""
        found = _TEXT.fullmatch(text)
        key_id, secret = found.groups() if found else ("", text[:_LONGEST_TEXT])
        key = self._keys().get(key_id)
        same = hmac.compare_digest(_NOBODY if key is None else key.digest, _digest(key_id, secret))
        if key is None or not same:
            raise KeyRefused("this API key is not known here, or was revoked")
        return key

    def list(self) -> Sequence[ApiKey]:
        """Every key, the oldest first. Raises KeyFileRefused."""
        return sorted(self._keys().values(), key=lambda key: (key.created, key.id))

    def create(self, tenant: str) -> tuple[ApiKey, str]:
        """A new key, and its text, which cannot be had again. Raises NameRefused, KeyFileRefused."""
        check_tenant(tenant)
        key_id, secret = _base32(_ID_NBYTES), _base32(_SECRET_NBYTES)
        key = ApiKey(key_id, tenant, time.time(), _digest(key_id, secret))
        with self._changing() as keys:
            if len(keys) >= MAX_KEYS:
                raise KeyFileRefused(f"there are {len(keys):,} API keys, and no more are taken")
            self._write({**keys, key.id: key})
        return key, f"tnt_{key_id}_{secret}"

    def revoke(self, key_id: str) -> ApiKey:
        """Forget a key. Raises KeyRefused where there is none of this id."""
        with self._changing() as keys:
            if key_id not in keys:
                raise KeyRefused(f"there is no API key of the id {key_id[:40]!r}")
            self._write({other: key for other, key in keys.items() if other != key_id})
            return keys[key_id]

    def revoke_all(self, tenant: str) -> int:
        """Forget every key of `tenant`. Returns how many there were."""
        if not any(key.tenant == tenant for key in self._keys().values()):
            return 0
        with self._changing() as keys:
            others = {key_id: key for key_id, key in keys.items() if key.tenant != tenant}
            self._write(others)
            return len(keys) - len(others)

    def _keys(self) -> dict[str, ApiKey]:
        with disk_errors(f"looking for the key file {self._file}"):
            now = signature(self._file)
        with self._lock:
            if now is None:
                return {}
            if self._at_hand[0] != now:
                self._at_hand = now, self._read()
            return self._at_hand[1]

    def _read(self) -> dict[str, ApiKey]:
        data = read_private(self._file)
        if data is None:
            return {}
        try:
            record = Record.of(unpack(unframed(data), "API keys"), "API keys")
            keys = [_read_key(each) for each in record.items("api_keys", MAX_KEYS)]
            record.end()
        except Corrupt as error:
            raise KeyFileRefused(f"the key file {self._file} is damaged: {error}") from error
        return {key.id: key for key in keys}

    def _write(self, keys: dict[str, ApiKey]) -> None:
        records = [
            {"created": key.created, "digest": key.digest, "id": key.id, "tenant": key.tenant}
            for _, key in sorted(keys.items())
        ]
        replace_private(self._file, framed(pack({"api_keys": records})))

    @contextlib.contextmanager
    def _changing(self) -> Iterator[dict[str, ApiKey]]:
        with contextlib.ExitStack() as held:
            with disk_errors(f"changing the key file {self._file}"):
                make_folders(self._folder)
                held.enter_context(locked(held.enter_context(opened_folder(self._folder))))
            yield self._read()


def _digest(key_id: str, secret: str) -> bytes:
    return blake3(f"{key_id}\0{secret}".encode("utf-8", "replace"), derive_key_context=_CONTEXT).digest()


def _base32(nbytes: int) -> str:
    return base64.b32encode(secrets.token_bytes(nbytes)).decode().rstrip("=").lower()


def _read_key(value: Any) -> ApiKey:
    record = Record.of(value, "API key")
    digest = record.value("digest")
    if not isinstance(digest, bytes) or len(digest) != _DIGEST_NBYTES:
        raise Corrupt("API key: no digest")
    key = ApiKey(
        text(record.value("id"), 64, "API key"),
        text(record.value("tenant"), 128, "API key"),
        real(record.value("created"), "API key"),
        digest,
    )
    record.end()
    return key
