"""What follows the prefix of a manifest: its map, packed (docs/format.md, section 5).

A map of a long conversation is text and token ids for the most part, which zstd halves. How a frame is spelt
is the library's affair, so that of two builds each may give a map another name; the map itself has one
spelling, and a reader takes no other.
"""

from __future__ import annotations

import struct

import zstandard

from engine.errors import Corrupt
from serialization.blobs import Bytes
from serialization.canonical import pack, unpack
from serialization.limits import MAX_MANIFEST_NBYTES, MAX_PACKED, MIN_PACKED_NBYTES, refuse_above
from serialization.records import Values, values_of

_SIZE = struct.Struct("<I")
#: Of what a higher one would save, little is left for manifests: a twentieth at four times the time.
_LEVEL = 3


def pack_body(values: Values) -> bytes:
    """The size of the map, then its zstd frame, or the map where that is not smaller, or much smaller than a
    reader would believe. Raises as `canonical.pack`."""
    plain = pack(values)
    refuse_above("manifest, in bytes", len(plain), MAX_MANIFEST_NBYTES)
    frame = zstandard.ZstdCompressor(level=_LEVEL).compress(plain)
    believed = len(frame) < len(plain) <= _believed(len(frame))
    return _SIZE.pack(len(plain)) + (frame if believed else plain)


def unpack_body(body: Bytes, what: str) -> Values:
    """The map. Raises Corrupt, and LimitExceeded before anything is allocated for it."""
    stored = memoryview(body)[_SIZE.size :]
    if len(body) < _SIZE.size:
        raise Corrupt(f"{what}: cut off")
    (nbytes,) = _SIZE.unpack(memoryview(body)[: _SIZE.size])
    refuse_above(f"{what}, in bytes", nbytes, MAX_MANIFEST_NBYTES)
    refuse_above(f"{what}, unpacked, in bytes", nbytes, _believed(len(stored)))
    return values_of(unpack(stored if len(stored) == nbytes else _unpacked(stored, nbytes, what), what), what)


def _believed(nbytes: int) -> int:
    """To how many bytes so many may unpack."""
    return max(MIN_PACKED_NBYTES, MAX_PACKED * nbytes)


def _unpacked(frame: memoryview, nbytes: int, what: str) -> bytes:
    """Into `nbytes` at most: a frame that holds more than it says is an error of the library, not memory."""
    if len(frame) > nbytes:
        raise Corrupt(f"{what}: packed, it is larger than unpacked")
    try:
        if zstandard.get_frame_parameters(frame).content_size != nbytes:
            raise Corrupt(f"{what}: packed in a frame of another size than it tells")
        return zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Corrupt(f"{what}: {error}") from error
