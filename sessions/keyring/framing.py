"""What every key file begins with: the prefix, and a digest that tells whether the rest is whole."""

from __future__ import annotations

from blake3 import blake3

from engine.errors import Corrupt
from serialization.prefix import PREFIX_NBYTES, Letter, check_prefix, prefix

_CHECKSUM_NBYTES = 32
_CONTENT = PREFIX_NBYTES + _CHECKSUM_NBYTES


def framed(content: bytes) -> bytes:
    return prefix(Letter.KEYS) + blake3(content).digest(length=_CHECKSUM_NBYTES) + content


def unframed(data: bytes) -> bytes:
    """The content again. Raises Corrupt unless it is whole, UnknownVersion for another format."""
    check_prefix(Letter.KEYS, data, "key file")
    content = data[_CONTENT:]
    if blake3(content).digest(length=_CHECKSUM_NBYTES) != data[PREFIX_NBYTES:_CONTENT]:
        raise Corrupt("key file: cut off, or not what was written")
    return content
