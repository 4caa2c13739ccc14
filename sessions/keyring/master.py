"""Master keys: what tenants' keys are wrapped with. They come from a file or the environment."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from engine.errors import KeyFileRefused, SealRefused
from sessions.keyring.private import read_given

KEY_NBYTES = 32
ID_NBYTES = 8

_KEY = re.compile(r"[0-9a-fA-F]{64}")
_ID_CONTEXT = "tenuto master key id, version 1"
_WRAP_CONTEXT = "tenuto master key wraps, version 1"


@dataclass(frozen=True, slots=True)
class WrappingKey:
    """Wraps key sets. `id` names it in what it wrapped, and tells nothing about it."""

    id: bytes
    cipher: AESGCM = field(repr=False)

    @classmethod
    def of(cls, secret: bytes) -> WrappingKey:
        key_id = blake3(secret, derive_key_context=_ID_CONTEXT).digest(length=ID_NBYTES)
        return cls(key_id, AESGCM(blake3(secret, derive_key_context=_WRAP_CONTEXT).digest()))


class MasterKeys:
    """The first wraps; each of them unwraps what it wrapped once. There may be none at all."""

    def __init__(self, secrets_: Sequence[bytes] = ()) -> None:
        self._keys = tuple(WrappingKey.of(secret) for secret in secrets_)

    def __repr__(self) -> str:
        return f"MasterKeys({', '.join(key.id.hex() for key in self._keys)})"

    @classmethod
    def parse(cls, text: str, where: str) -> MasterKeys:
        """Keys of 64 hex digits each, between blanks, commas or line ends; '#' begins a remark.

        Raises KeyFileRefused, which says `where` and nothing of the text.
        """
        words = " ".join(line.partition("#")[0] for line in text.splitlines()).replace(",", " ").split()
        if not words or not all(_KEY.fullmatch(word) for word in words):
            raise KeyFileRefused(f"{where} is no master key: 64 hex digits, or several such, one a line")
        return cls([bytes.fromhex(word) for word in words])

    @classmethod
    def read(cls, path: Path) -> MasterKeys:
        """The keys of a file. Raises KeyFileRefused, StoreUnavailable."""
        return cls.parse(read_given(path).decode("ascii", "replace"), f"the key file {path}")

    def __bool__(self) -> bool:
        return bool(self._keys)

    @property
    def current(self) -> WrappingKey:
        if not self._keys:
            raise SealRefused("no master key was given")
        return self._keys[0]

    def find(self, key_id: bytes) -> WrappingKey | None:
        return next((key for key in self._keys if key.id == key_id), None)


def new_master_key() -> str:
    """One more key, as `parse` reads it."""
    return secrets.token_hex(KEY_NBYTES)
