"""A key set: what one tenant (or one session) is sealed with, and how it lies wrapped in a key file.

docs/format.md, section 12.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from cryptography.exceptions import InvalidTag

from engine.errors import Corrupt, KeyFileRefused, SealRefused
from serialization.canonical import pack, unpack
from serialization.records import Record, exactly, integer, real
from sessions.keyring.framing import framed, unframed
from sessions.keyring.master import ID_NBYTES, KEY_NBYTES, WrappingKey

SET_NBYTES = 16
NONCE_NBYTES = 12
MAX_DATA_KEYS = 2**16

_MAX_NUMBER = 2**32 - 1


class Scope(StrEnum):
    """Whose a key set is: all that one tenant has is shared under it, or each session has one of its own."""

    TENANT = "tenant"
    SESSION = "session"


@dataclass(frozen=True, slots=True)
class DataKey:
    """A key that blobs and refs are enciphered with. `created` in seconds since 1970."""

    number: int
    created: float
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class KeySet:
    """`naming` makes names, and stays as long as the set; of the data keys the last one enciphers."""

    id: bytes
    scope: Scope
    naming: bytes = field(repr=False)
    data: tuple[DataKey, ...]

    @classmethod
    def new(cls, scope: Scope, now: float, set_id: bytes | None = None) -> KeySet:
        first = DataKey(1, now, os.urandom(KEY_NBYTES))
        return cls(set_id or os.urandom(SET_NBYTES), scope, os.urandom(KEY_NBYTES), (first,))

    def rotated(self, now: float) -> KeySet:
        """With one data key more."""
        if len(self.data) >= MAX_DATA_KEYS:
            raise SealRefused(f"{len(self.data):,} data keys are enough: drop the old ones")
        fresh = DataKey(self.data[-1].number + 1, now, os.urandom(KEY_NBYTES))
        return replace(self, data=(*self.data, fresh))

    def newest_only(self) -> KeySet:
        return replace(self, data=self.data[-1:])


@dataclass(frozen=True, slots=True)
class KeyFile:
    """What a key file says: whose set it is, and the set, wrapped; or that it was erased.

    `of` is a tenant's name or a session's id. `wrapped` is nonce and ciphertext.
    """

    of: str
    set_id: bytes
    scope: Scope
    created: float
    erased: float | None
    wrapper: bytes | None
    wrapped: bytes | None = field(repr=False)

    @classmethod
    def wrap(cls, of: str, keys: KeySet, created: float, wrapper: WrappingKey) -> KeyFile:
        secret = pack(
            {"data": [[key.number, key.created, key.secret] for key in keys.data], "naming": keys.naming}
        )
        nonce = os.urandom(NONCE_NBYTES)
        bare = cls(of, keys.id, keys.scope, created, None, wrapper.id, None)
        return replace(bare, wrapped=nonce + wrapper.cipher.encrypt(nonce, secret, bare._bound()))

    def unwrap(self, wrapper: WrappingKey) -> KeySet:
        """Raises KeyFileRefused if it was altered, or wrapped by another key that says it is this one."""
        wrapped = self.wrapped or b""
        try:
            secret = wrapper.cipher.decrypt(wrapped[:NONCE_NBYTES], wrapped[NONCE_NBYTES:], self._bound())
        except (InvalidTag, ValueError):
            raise KeyFileRefused(f"the keys of {self.of} were altered: they cannot be unwrapped") from None
        record = Record.of(unpack(secret, "key set"), "key set")
        data = tuple(_read_data(each) for each in record.items("data", MAX_DATA_KEYS))
        naming = _sized(record.value("naming"), KEY_NBYTES)
        record.end()
        return KeySet(self.set_id, self.scope, naming, data)

    def gone(self, now: float) -> KeyFile:
        """What stays of it after its keys were destroyed."""
        return replace(self, erased=now, wrapper=None, wrapped=None)

    def encode(self) -> bytes:
        return framed(pack(self._record()))

    @classmethod
    def decode(cls, data: bytes, where: str) -> KeyFile:
        """Raises KeyFileRefused unless `data` is a whole key file, UnknownVersion for another format."""
        try:
            return cls._decode(data)
        except (Corrupt, ValueError) as error:
            raise KeyFileRefused(f"{where} is damaged: {error}") from error

    @classmethod
    def _decode(cls, data: bytes) -> KeyFile:
        record = Record.of(unpack(unframed(data), "key file"), "key file")
        erased, wrapper, wrapped = (record.value(key) for key in ("erased", "wrapper", "wrapped"))
        file = cls(
            of=record.text("of", 128),
            set_id=_sized(record.value("set"), SET_NBYTES),
            scope=Scope(record.text("scope", 16)),
            created=record.real("created"),
            erased=None if erased is None else real(erased, "key file"),
            wrapper=None if wrapper is None else _sized(wrapper, ID_NBYTES),
            wrapped=wrapped if isinstance(wrapped, bytes) else None,
        )
        record.end()
        return file

    def _record(self) -> dict[str, object]:
        return {
            "created": self.created,
            "erased": self.erased,
            "of": self.of,
            "scope": self.scope.value,
            "set": self.set_id,
            "wrapped": self.wrapped,
            "wrapper": self.wrapper,
        }

    def _bound(self) -> bytes:
        """What the wrap holds fast besides the secrets: everything that the file says in the clear."""
        return pack({key: value for key, value in self._record().items() if key != "wrapped"})


def _read_data(value: Any) -> DataKey:
    number, created, secret = exactly(value, 3, "data key")
    return DataKey(
        integer(number, _MAX_NUMBER, "data key"), real(created, "data key"), _sized(secret, KEY_NBYTES)
    )


def _sized(value: Any, nbytes: int) -> bytes:
    if not isinstance(value, bytes) or len(value) != nbytes:
        raise Corrupt(f"not {nbytes} bytes")
    return value
