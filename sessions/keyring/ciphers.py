"""What a key set does: names, seals and opens blobs and refs. AES-256-GCM, and keyed BLAKE3 for names."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from engine.errors import Corrupt, IndexDamaged
from serialization import sealed
from serialization.blobs import BlobClass, BlobId, Bytes, short
from serialization.sealed import Sealed
from sessions.keyring.keyset import NONCE_NBYTES, SET_NBYTES, DataKey, KeySet
from sessions.keyring.master import WrappingKey
from sessions.names import SESSIONS, is_session_id

_BEGUN_DIGITS = 8

#: Each use has a key of its own, derived with a text of its own.
_BLOB_NAMES = "tenuto sealed blob names, version 1"
_REF_NAMES = "tenuto sealed ref names, version 1"
_SESSION_SETS = "tenuto key sets of sessions, version 1"
_SESSION_WRAPS = "tenuto wraps of sessions' key sets, version 1"
_BLOBS = "tenuto sealed blobs, version 1"
_REFS = "tenuto sealed refs, version 1"


@dataclass(frozen=True, slots=True)
class _DataCiphers:
    number: int
    blobs: AESGCM = field(repr=False)
    refs: AESGCM = field(repr=False)

    @classmethod
    def of(cls, key: DataKey) -> _DataCiphers:
        return cls(key.number, AESGCM(_derive(key.secret, _BLOBS)), AESGCM(_derive(key.secret, _REFS)))


class Ciphers:
    """A key set of `tenant`, ready for use. Safe from many threads; holds nothing that changes."""

    def __init__(self, keys: KeySet, tenant: str) -> None:
        self.set_id = keys.id
        self.scope = keys.scope
        self._tenant = tenant
        self._data = {key.number: _DataCiphers.of(key) for key in keys.data}
        self._newest = self._data[keys.data[-1].number]
        self._blob_names = _derive(keys.naming, _BLOB_NAMES)
        self._ref_names = _derive(keys.naming, _REF_NAMES)
        self._session_sets = _derive(keys.naming, _SESSION_SETS)
        self._naming = keys.naming

    def __repr__(self) -> str:
        return f"Ciphers({self.set_id.hex()}, tenant={self._tenant!r})"

    # --- sets of sessions ---------------------------------------------------------------------

    def session_set(self, session: str) -> bytes:
        """The id of the key set that a session has for itself."""
        return blake3(session.encode(), key=self._session_sets).digest(length=SET_NBYTES)

    def session_wrapper(self) -> WrappingKey:
        """What those are wrapped with, so that they are gone when this set is."""
        return WrappingKey.of(_derive(self._naming, _SESSION_WRAPS))

    # --- blobs --------------------------------------------------------------------------------

    def blob_id(self, cls: BlobClass, data: Bytes) -> BlobId:
        """The name of a blob by its content: of equal ones equal, and without this set it tells nothing."""
        return BlobId(f"{cls}-k3-{blake3(data, key=self._blob_names).hexdigest()}")

    def seal_blob(self, blob: BlobId, data: Bytes) -> bytes:
        """What to store as `blob`."""
        nonce = os.urandom(NONCE_NBYTES)
        ciphertext = self._newest.blobs.encrypt(nonce, data, self._bound(blob))
        return sealed.write_blob(blob, Sealed(self.set_id, self._newest.number, nonce, ciphertext))

    def open_blob(self, blob: BlobId, found: Sealed) -> bytes | None:
        """The content of what is stored as `blob`; None if its data key is gone. Raises Corrupt."""
        key = self._data.get(found.number)
        if key is None:
            return None
        try:
            return key.blobs.decrypt(found.nonce, found.ciphertext, self._bound(blob))
        except InvalidTag:
            raise Corrupt(f"blob {short(blob)}: not what was sealed under this name and these keys") from None

    def is_newest(self, found: Sealed) -> bool:
        """Whether it was enciphered with the key that enciphers now."""
        return found.set_id == self.set_id and found.number == self._newest.number

    # --- refs ---------------------------------------------------------------------------------

    def ref_name(self, name: str) -> str:
        """What a ref is stored as: a digest of its first word, by which it is listed, then one of all. In
        between stands of a session's ref when the session was begun: so a page of them can be had without
        opening all."""
        start, digest = self.ref_start(name.partition("/")[0]), self._name_digest("whole", name, 20)
        if not name.startswith(SESSIONS):
            return f"{start}{digest}"
        session = name.removeprefix(SESSIONS)
        return f"{start}{begun(session) if is_session_id(session) else ''}-{digest}"

    def ref_start(self, word: str) -> str:
        """How the stored names of all refs begin whose first word is `word`."""
        return f"{self._name_digest('first', word, 16)}/"

    def seal_ref(self, name: str, value: bytes) -> bytes:
        """What to store as the value of `ref_name(name)`."""
        nonce = os.urandom(NONCE_NBYTES)
        content = sealed.pack_ref(name, value)
        ciphertext = self._newest.refs.encrypt(nonce, content, self._bound(self.ref_name(name)))
        return sealed.write_ref(Sealed(self.set_id, self._newest.number, nonce, ciphertext))

    def open_ref(self, stored_name: str, value: bytes) -> tuple[str, bytes] | None:
        """Name and value of a stored ref; None if its data key is gone. Raises IndexDamaged."""
        found = sealed.read_ref(value)
        if found is None or found.set_id != self.set_id:
            raise _damaged(stored_name)
        key = self._data.get(found.number)
        if key is None:
            return None
        try:
            content = key.refs.decrypt(found.nonce, found.ciphertext, self._bound(stored_name))
        except InvalidTag:
            raise _damaged(stored_name) from None
        return sealed.unpack_ref(content)

    def is_newest_ref(self, value: bytes) -> bool:
        """`is_newest` of the stored value of a ref."""
        found = sealed.read_ref(value)
        return found is not None and self.is_newest(found)

    def _name_digest(self, what: str, text: str, nbytes: int) -> str:
        return blake3(f"{what}\0{text}".encode(), key=self._ref_names).hexdigest(length=nbytes)

    def _bound(self, stored_name: str) -> bytes:
        """What a tag holds fast besides the content. The name of a blob begins with its class."""
        return f"{stored_name}\0{self._tenant}".encode()


def begun(session: str) -> str:
    """What a stored ref shows of a session's id: when it was begun, to about a second."""
    return session[:_BEGUN_DIGITS]


def _derive(secret: bytes, use: str) -> bytes:
    return blake3(secret, derive_key_context=use).digest()


def _damaged(stored_name: str) -> IndexDamaged:
    return IndexDamaged(
        f"ref {stored_name}: not what was sealed under this name and these keys (check --repair rebuilds it)"
    )
