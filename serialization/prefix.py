"""The eight bytes that begin every stored file (docs/format.md, section 1)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from engine.errors import Corrupt, UnknownVersion
from serialization.blobs import Bytes

MAGIC = b"tenuto"
PREFIX_NBYTES = 8


class Letter(Enum):
    BLOB = b"B"
    MANIFEST = b"M"
    ARCHIVE = b"A"
    SEALED = b"S"
    KEYS = b"K"


#: The version that each kind of file is written in. It is the only one there ever was of all but manifests.
VERSIONS: Mapping[Letter, int] = {
    Letter.BLOB: 1,
    Letter.MANIFEST: 2,
    Letter.ARCHIVE: 1,
    Letter.SEALED: 1,
    Letter.KEYS: 1,
}


def prefix(letter: Letter) -> bytes:
    return MAGIC + letter.value + bytes([VERSIONS[letter]])


def check_prefix(letter: Letter, data: Bytes, what: str) -> None:
    """Raises Corrupt unless `data` begins with the magic and `letter`, UnknownVersion unless it is of the
    version that is written."""
    if (version := _version(letter, data, what)) != VERSIONS[letter]:
        raise _unknown(letter, version, what)


def read_version(letter: Letter, data: Bytes, what: str) -> int:
    """The version of `data`, of those that were ever written: for who reads the older ones, too. Raises
    Corrupt unless it begins with the magic and `letter`, UnknownVersion for a version that never was."""
    if not 1 <= (version := _version(letter, data, what)) <= VERSIONS[letter]:
        raise _unknown(letter, version, what)
    return version


def _version(letter: Letter, data: Bytes, what: str) -> int:
    head = bytes(data[:PREFIX_NBYTES])
    if len(head) != PREFIX_NBYTES or head[:6] != MAGIC or head[6:7] != letter.value:
        raise Corrupt(f"{what}: does not begin as one")
    return head[7]


def _unknown(letter: Letter, version: int, what: str) -> UnknownVersion:
    newest = VERSIONS[letter]
    known = "1 alone" if newest == 1 else f"1 to {newest}"
    return UnknownVersion(
        f"{what}: format version {version} is not known; this build reads {known}", version=version
    )
