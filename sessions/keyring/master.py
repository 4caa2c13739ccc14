"""Master keys: what tenants' keys are wrapped with. They come from a file or the environment."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from engine.errors import KeyFileRefused, SealRefused
from sessions.keyring.private import read_given, replace_private
from sessions.stores.folder import disk_errors, locked, make_folders, opened_folder

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
    """The first wraps; each of them unwraps what it wrapped once. There may be none at all.

    Those of a file are read again when one is asked for that was not among them.
    """

    def __init__(self, secrets_: Sequence[bytes] = (), path: Path | None = None) -> None:
        self._keys = tuple(WrappingKey.of(secret) for secret in secrets_)
        self._path = path

    def __repr__(self) -> str:
        return f"MasterKeys({', '.join(key.id.hex() for key in self._keys)})"

    @classmethod
    def parse(cls, text: str, where: str) -> MasterKeys:
        """Keys of 64 hex digits each, between blanks, commas or line ends; '#' begins a remark.

        Raises KeyFileRefused, which says `where` and nothing of the text.
        """
        return cls(_parse(text, where))

    @classmethod
    def read(cls, path: Path) -> MasterKeys:
        """The keys of a file. Raises KeyFileRefused, StoreUnavailable."""
        return cls(_read(path), path)

    def __bool__(self) -> bool:
        return bool(self._keys)

    @property
    def current(self) -> WrappingKey:
        if not self._keys:
            raise SealRefused("no master key was given")
        return self._keys[0]

    def find(self, key_id: bytes) -> WrappingKey | None:
        """The key of that id, None if it was not given. Raises KeyFileRefused, StoreUnavailable."""
        if self._path is not None and all(key.id != key_id for key in self._keys):
            self._keys = tuple(WrappingKey.of(secret) for secret in _read(self._path))
        return next((key for key in self._keys if key.id == key_id), None)


def make_master(path: Path) -> None:
    """A new file with a new key, its folder made at need. Raises KeyFileRefused where there is one."""
    path = path.parent.resolve() / path.name
    with disk_errors(f"making the key file {path}"):
        make_folders(path.parent)
    with _changing(path):
        if os.path.lexists(path):
            raise KeyFileRefused(f"{path} is there already, and is not overwritten")
        replace_private(path, _line(_new()))


def add_master(path: Path) -> MasterKeys:
    """The keys of the file with a new one before them, which wraps from now on."""
    path = path.resolve()
    with _changing(path):
        replace_private(path, b"".join(map(_line, [_new(), *_read(path)])))
    return MasterKeys.read(path)


def keep_newest(path: Path) -> None:
    """Leave the first key alone in the file: what only the others unwrap is lost."""
    path = path.resolve()
    with _changing(path):
        replace_private(path, _line(_read(path)[0]))


def _parse(text: str, where: str) -> list[bytes]:
    words = " ".join(line.partition("#")[0] for line in text.splitlines()).replace(",", " ").split()
    if not words or not all(_KEY.fullmatch(word) for word in words):
        raise KeyFileRefused(f"{where} is no master key: 64 hex digits, or several such, one a line")
    return [bytes.fromhex(word) for word in words]


def _read(path: Path) -> list[bytes]:
    return _parse(read_given(path).decode("ascii", "replace"), f"the key file {path}")


def _new() -> bytes:
    return secrets.token_bytes(KEY_NBYTES)


def _line(secret: bytes) -> bytes:
    return secret.hex().encode() + b"\n"


@contextlib.contextmanager
def _changing(path: Path) -> Iterator[None]:
    with contextlib.ExitStack() as held:
        with disk_errors(f"changing the key file {path}"):
            held.enter_context(locked(held.enter_context(opened_folder(path.parent))))
        yield
