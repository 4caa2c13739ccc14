"""One session in one portable file (`.tenuto`, docs/format.md, section 6), written and read front to back.

Neither end needs a file that can seek, and neither holds more than one blob at a time.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Protocol

from blake3 import blake3

from engine.errors import Corrupt
from serialization.blobs import (
    BlobClass,
    BlobId,
    Bytes,
    Store,
    blob_class,
    blob_id,
    is_sealed,
    short,
    verify_blob,
)
from serialization.limits import MAX_MANIFEST_NBYTES, refuse_above
from serialization.manifest import Manifest, manifest_id
from serialization.prefix import PREFIX_NBYTES, Letter, check_prefix, prefix
from serialization.renaming import renamed

_RECORD = struct.Struct("<cQ32s")  # letter, size, digest
_LETTERS = {BlobClass.MANIFEST: b"M", BlobClass.ROWS: b"R", BlobClass.POINT: b"P"}
_END = b"E"
_DIGEST_NBYTES = 32
_PIECE = 2**20


class Sink(Protocol):
    """Where an archive is written: a file, pipe or socket."""

    def write(self, data: Bytes, /) -> object: ...


class Source(Protocol):
    """Where an archive is read. `read` may return less than asked, and nothing at the end alone."""

    def read(self, nbytes: int, /) -> bytes: ...


def write_archive(out: Sink, manifest: Manifest, store: Store) -> int:
    """Write `manifest` and every blob that it names to `out`. Returns the number of bytes.

    In an archive nothing is sealed: blobs that are in the store have their plain names in it.

    Raises BlobMissing, Corrupt, StoreUnavailable, and what `out` raises; what was written by then is no
    archive, since it has no end.
    """
    plain = _plain_names(manifest, store)
    writer = _Writer(out)
    writer.begin(renamed(manifest, plain).encode())
    for ref in manifest.blobs():
        data = store.get(ref.blob)
        if len(data) != ref.nbytes:
            raise Corrupt(f"blob {short(ref.blob)}: not as large as its manifest says")
        writer.blob(plain.get(ref.blob, ref.blob), data)
    return writer.end()


def copy_archive(
    src: Source, out: Sink, announced: Callable[[Manifest], Manifest] = lambda manifest: manifest
) -> tuple[Manifest, int]:
    """Verify an archive and write it to `out` as it comes, in the newest format. `announced` is called with
    its manifest before the first blob, and says which one to write, by the same blobs; it may raise. Returns
    that one, and the number of bytes.

    Raises as `read_archive`, and what `out` raises; what was written by then is no archive.
    """
    writer = _Writer(out)
    written: list[Manifest] = []

    def begin(manifest: Manifest) -> None:
        written.append(announced(manifest))
        writer.begin(written[0].encode())

    _read(src, writer.blob, begin)
    return written[0], writer.end()


def read_archive(
    src: Source, store: Store, announced: Callable[[Manifest], object] = lambda manifest: None
) -> Manifest:
    """Put every blob of an archive in `store`, and return its manifest, which is *not* put.

    `announced` is called with the manifest before the first blob is read, and may raise.

    Each blob is put as soon as its digest was right, and the manifest names it as the store does. If the
    archive turns out to be damaged further on, the blobs put by then are unreferenced and gc collects them.
    The caller decides what session the manifest becomes, and commits it.

    Raises Corrupt, UnknownVersion, UnknownFeature, LimitExceeded, StoreFull, StoreUnavailable.
    """

    put_as: dict[BlobId, BlobId] = {}

    def put(blob: BlobId, data: bytes) -> None:
        put_as[blob] = store.put(blob_class(blob), data)

    return renamed(_read(src, put, announced), put_as)


def archived(src: Source) -> Manifest:
    """The manifest that an archive begins with. Nothing behind it is read. Raises as `read_archive`."""
    return _begin(_Reader(src))


def check_archive(src: Source) -> Manifest:
    """Read a whole archive, storing nothing. Raises as `read_archive`."""

    def verified(blob: BlobId, data: bytes) -> None:
        pass

    return _read(src, verified, lambda manifest: None)


def _read(
    src: Source, accept: Callable[[BlobId, bytes], None], announced: Callable[[Manifest], object]
) -> Manifest:
    """Verify an archive to its end, handing its manifest to `announced` and each blob to `accept`."""
    reader = _Reader(src)
    manifest = _begin(reader)
    announced(manifest)
    for ref in manifest.blobs():
        if is_sealed(ref.blob):
            raise Corrupt(f"archive: blob {short(ref.blob)} is a sealed one")
        if reader.take(_RECORD.size) != _head(ref.blob, ref.nbytes):
            raise Corrupt(f"archive: blob {short(ref.blob)} is not where it belongs")
        data = reader.take(ref.nbytes)
        verify_blob(ref.blob, data)
        accept(ref.blob, data)
    if reader.take(1) != _END:
        raise Corrupt("archive: more blobs than its manifest names")
    reader.end()
    return manifest


def _begin(reader: _Reader) -> Manifest:
    check_prefix(Letter.ARCHIVE, reader.take(PREFIX_NBYTES), "archive")
    letter, nbytes, digest = _RECORD.unpack(reader.take(_RECORD.size))
    if letter != _LETTERS[BlobClass.MANIFEST]:
        raise Corrupt("archive: it does not begin with a manifest")
    refuse_above("manifest, in bytes", nbytes, MAX_MANIFEST_NBYTES)
    encoded = reader.take(nbytes)
    verify_blob(_named(BlobClass.MANIFEST, digest), encoded)
    return Manifest.decode(encoded)


def _plain_names(manifest: Manifest, store: Store) -> dict[BlobId, BlobId]:
    """What sealed blobs are called by their content. They are read twice, since the manifest comes first."""
    sealed = [ref.blob for ref in manifest.blobs() if is_sealed(ref.blob)]
    return {blob: blob_id(blob_class(blob), store.get(blob)) for blob in sealed}


def _head(blob: BlobId, nbytes: int) -> bytes:
    digest = bytes.fromhex(blob.rpartition("-")[2])
    return _RECORD.pack(_LETTERS[blob_class(blob)], nbytes, digest)


def _named(cls: BlobClass, digest: bytes) -> BlobId:
    return BlobId(f"{cls}-b3-{digest.hex()}")


class _Writer:
    """Writes the pieces of an archive, and digests all that it wrote."""

    def __init__(self, out: Sink) -> None:
        self._out = out
        self._whole = blake3()
        self._nbytes = 0

    def begin(self, manifest: bytes) -> None:
        self._write(prefix(Letter.ARCHIVE))
        self.blob(manifest_id(manifest), manifest)

    def blob(self, blob: BlobId, data: Bytes) -> None:
        self._write(_head(blob, len(data)))
        self._write(data)

    def end(self) -> int:
        """The number of bytes in all."""
        self._write(_END)
        self._out.write(self._whole.digest())
        return self._nbytes + _DIGEST_NBYTES

    def _write(self, data: Bytes) -> None:
        self._whole.update(data)
        self._nbytes += len(data)
        self._out.write(data)


class _Reader:
    """Takes whole pieces from a source, and digests all that it took."""

    def __init__(self, src: Source) -> None:
        self._src = src
        self._whole = blake3()

    def take(self, nbytes: int) -> bytes:
        """The next `nbytes`. Raises Corrupt at an early end; grows only as bytes arrive."""
        taken = self._taken(nbytes)
        self._whole.update(taken)
        return taken

    def end(self) -> None:
        """Raises Corrupt unless the digest of all that was taken follows, and nothing more."""
        digest = self._whole.digest()
        if self._taken(_DIGEST_NBYTES) != digest:
            raise Corrupt("archive: its digest is not that of its content")
        if self._src.read(1):
            raise Corrupt("archive: bytes after the end")

    def _taken(self, nbytes: int) -> bytes:
        taken = bytearray()
        while len(taken) < nbytes:
            piece = self._src.read(min(_PIECE, nbytes - len(taken)))
            if not piece:
                raise Corrupt("archive: cut off")
            taken += piece
        return bytes(taken)


def archive_nbytes(manifest: Manifest) -> int:
    """The size that `write_archive` will write."""
    sizes = (len(manifest.encode()), *(ref.nbytes for ref in manifest.blobs()))
    records = sum(_RECORD.size + nbytes for nbytes in sizes)
    return PREFIX_NBYTES + records + len(_END) + _DIGEST_NBYTES
