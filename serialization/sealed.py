"""How sealed blobs and sealed refs are laid out (docs/format.md, section 11). Nothing here has a key."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from engine.errors import Corrupt
from serialization.blobs import CHECKSUM_NBYTES, BlobId, Bytes, checksum, short
from serialization.prefix import PREFIX_NBYTES, Letter, check_prefix, prefix

TAG_NBYTES = 16
_REF_VERSION = 1

_KEY = struct.Struct("<16sI12s")  # key set, number of the data key in it, nonce
_NAME = struct.Struct("<H")

#: By so many bytes a sealed blob is larger than its content, and a sealed ref at most than its value.
BLOB_ROOM = PREFIX_NBYTES + _KEY.size + TAG_NBYTES + CHECKSUM_NBYTES
REF_ROOM = 1 + _KEY.size + _NAME.size + 512 + TAG_NBYTES


@dataclass(frozen=True, slots=True)
class Sealed:
    """What was enciphered: by data key `number` of key set `set_id`, with `nonce`. The ciphertext ends with
    its tag."""

    set_id: bytes
    number: int
    nonce: bytes
    ciphertext: Bytes


def write_blob(blob: BlobId, sealed: Sealed) -> bytes:
    """The bytes that are stored as `blob`."""
    head = prefix(Letter.SEALED) + _KEY.pack(sealed.set_id, sealed.number, sealed.nonce)
    return b"".join((head, sealed.ciphertext, checksum(blob, head, sealed.ciphertext)))


def read_blob(blob: BlobId, data: Bytes) -> Sealed:
    """What is stored as `blob`, whose checksum the store compared. Raises Corrupt, UnknownVersion."""
    view = memoryview(data)
    if len(view) < BLOB_ROOM:
        raise Corrupt(f"blob {short(blob)}: too short for a sealed one")
    check_prefix(Letter.SEALED, view, f"blob {short(blob)}")
    set_id, number, nonce = _KEY.unpack_from(view, PREFIX_NBYTES)
    return Sealed(set_id, number, nonce, view[PREFIX_NBYTES + _KEY.size : -CHECKSUM_NBYTES])


def write_ref(sealed: Sealed) -> bytes:
    """The value that is stored of a ref."""
    key = _KEY.pack(sealed.set_id, sealed.number, sealed.nonce)
    return b"".join((bytes([_REF_VERSION]), key, sealed.ciphertext))


def read_ref(data: bytes) -> Sealed | None:
    """What is stored of a ref; None where that is no sealed value."""
    if len(data) < 1 + _KEY.size + _NAME.size + TAG_NBYTES or data[0] != _REF_VERSION:
        return None
    set_id, number, nonce = _KEY.unpack_from(data, 1)
    return Sealed(set_id, number, nonce, data[1 + _KEY.size :])


def pack_ref(name: str, value: bytes) -> bytes:
    """What is enciphered of a ref: its name, which cannot be had from the stored one, and its value."""
    return b"".join((_NAME.pack(len(name)), name.encode("ascii"), value))


def unpack_ref(content: bytes) -> tuple[str, bytes]:
    """Name and value again, of what was authenticated before."""
    (nbytes,) = _NAME.unpack_from(content)
    return content[_NAME.size : _NAME.size + nbytes].decode("ascii"), content[_NAME.size + nbytes :]
