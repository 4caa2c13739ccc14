"""The eight bytes that begin every stored file (docs/format.md, section 1)."""

from __future__ import annotations

from enum import Enum

from engine.errors import Corrupt, UnknownVersion
from serialization.blobs import Bytes

MAGIC = b"tenuto"
VERSION = 1
PREFIX_NBYTES = 8


class Letter(Enum):
    BLOB = b"B"
    MANIFEST = b"M"
    ARCHIVE = b"A"
    SEALED = b"S"
    KEYS = b"K"


def prefix(letter: Letter) -> bytes:
    return MAGIC + letter.value + bytes([VERSION])


def check_prefix(letter: Letter, data: Bytes, what: str) -> None:
    """Raises Corrupt unless `data` begins with the magic and `letter`, UnknownVersion for another version."""
    head = bytes(data[:PREFIX_NBYTES])
    if len(head) != PREFIX_NBYTES or head[:6] != MAGIC or head[6:7] != letter.value:
        raise Corrupt(f"{what}: does not begin as one")
    if head[7] != VERSION:
        raise UnknownVersion(f"{what}: format version {head[7]} is not known", version=head[7])
