"""A store whose content nobody can read without keys: blobs, refs and their names are sealed (AES-256-GCM).

What it says of itself to its callers is as of any store; what it keeps is in the store beneath, in which
each blob has a keyed name, each ref a digest for a name, and one ref, `MARKER`, tells that all is sealed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from heapq import merge
from itertools import chain, groupby, islice, takewhile

from engine.errors import BlobMissing, Corrupt, IndexDamaged, SealRefused, StateError
from serialization.blobs import (
    BlobClass,
    BlobId,
    BlobInfo,
    Bytes,
    Store,
    StrayInfo,
    TierInfo,
    blob_class,
    is_sealed,
    parse_blob_id,
    short,
)
from serialization.buffers import NEW, Buffers
from serialization.canonical import pack
from serialization.sealed import BLOB_ROOM, REF_ROOM, read_blob
from sessions.keyring.ciphers import Ciphers, begun
from sessions.keyring.keyset import Scope
from sessions.keyring.tenants import TenantKeys
from sessions.names import SESSIONS
from sessions.stores.base import (
    StoreConfig,
    check_blob_size,
    check_prefix,
    check_ref_name,
    check_refs,
    check_swap,
)

MARKER = "sealed"
VERSION = 2

#: How often refs are read again that were sealed anew, and their old key dropped, while they were read.
_TRIES = 2
#: Stored refs that are read at once, from the last one on, back.
_PAGE = 128
#: Where others show when their session was begun.
_UNTIMED = "-"


def roomier(config: StoreConfig) -> StoreConfig:
    """The settings of the store beneath: what is sealed is larger by a little."""
    return replace(config, max_blob=config.max_blob + BLOB_ROOM, max_ref=config.max_ref + REF_ROOM)


class SealedStore:
    """See `serialization.blobs.Store`. Every call may raise SealRefused, Erased or KeyFileRefused besides.

    Sizes are those of what is stored beneath. A `put` of what is there under an older data key replaces it.
    """

    def __init__(
        self,
        inner: Store,
        keys: TenantKeys,
        config: StoreConfig | None = None,
        session: str | None = None,
    ) -> None:
        """`inner` has the settings `roomier(config)`, and is closed with this. Blobs are put for `session`,
        where each has keys of its own."""
        self._inner = inner
        self._keys = keys
        self._config = config or StoreConfig()
        self._session = session

    def __repr__(self) -> str:
        return f"SealedStore({self._inner!r})"

    # --- blobs --------------------------------------------------------------------------------

    def put(self, cls: BlobClass, data: Bytes) -> BlobId:
        view = memoryview(data).cast("B")
        check_blob_size(view.nbytes, self._config)
        if self._session is None and self._keys.scope is Scope.SESSION:
            raise SealRefused("each session has keys of its own here: blobs are put for one (Store.scoped)")
        with self._keys.writing(self._session) as ciphers:
            blob = ciphers.blob_id(cls, view)
            there = self._there(blob, ciphers)
            self._inner.put_as(blob, ciphers.seal_blob(blob, view) if there is None else there)
        return blob

    def put_as(self, blob: BlobId, data: Bytes) -> None:
        """Names are made here. Raises Corrupt for another one."""
        if self.put(blob_class(parse_blob_id(blob)), data) != blob:
            raise Corrupt(f"blob {short(blob)}: not the name of these bytes here")

    def get(self, blob: BlobId, buffers: Buffers = NEW) -> bytes:
        if not is_sealed(parse_blob_id(blob)):
            raise BlobMissing(f"blob {short(blob)} is not in the store, where all is sealed")
        for read in (partial(self._inner.get, buffers=buffers), self._inner.get_anew):
            found = read_blob(blob, read(blob))
            ciphers = self._keys.find(found.set_id)
            data = None if ciphers is None else ciphers.open_blob(blob, found)
            if data is not None:
                return data
        raise Corrupt(f"blob {short(blob)}: sealed with keys that are not here (any more)")

    def get_anew(self, blob: BlobId) -> bytes:
        """What was replaced is told by its key, and is read anew by any `get`."""
        return self.get(blob)

    def has(self, blobs: Sequence[BlobId]) -> tuple[bool, ...]:
        there = self._inner.has(blobs)
        return tuple(found and is_sealed(blob) for blob, found in zip(blobs, there, strict=True))

    def refresh(self, blobs: Sequence[BlobId]) -> None:
        self._inner.refresh([blob for blob in blobs if is_sealed(parse_blob_id(blob))])

    def list_blobs(self) -> Iterator[BlobInfo]:
        return (info for info in self._inner.list_blobs() if is_sealed(info.blob))

    def delete_blob(self, blob: BlobId, older_than: float) -> bool:
        return self._inner.delete_blob(blob, older_than)

    def list_stray(self) -> Iterator[StrayInfo]:
        return self._inner.list_stray()

    def sweep(self, older_than: float) -> int:
        return self._inner.sweep(older_than)

    def reseal_blob(self, blob: BlobId) -> bool:
        """Seal the blob anew if it was by an older data key. Returns whether it was. Raises as `get`; a blob
        that is gone is no matter."""
        try:
            found = read_blob(blob, self._inner.get(blob))
        except BlobMissing:
            return False
        ciphers = self._keys.find(found.set_id)
        if ciphers is not None and ciphers.is_newest(found):
            return False
        data = self.get(blob)
        with self._keys.writing_by(found.set_id) as ciphers:
            self._inner.put_as(blob, ciphers.seal_blob(blob, data))
        return True

    # --- refs ---------------------------------------------------------------------------------

    def read(self, name: str) -> bytes | None:
        return self.read_many([name])[0]

    def read_many(self, names: Sequence[str]) -> tuple[bytes | None, ...]:
        for name in names:
            check_ref_name(name)
        ciphers = self._keys.current()
        return tuple(value for _, value in self._read([ciphers.ref_name(name) for name in names]))

    def list_refs(self, prefix: str) -> Iterator[tuple[str, bytes]]:
        check_prefix(prefix)
        word, slash, rest = prefix.partition("/")
        start = self._keys.current().ref_start(word) if slash else ""
        starts = [start]
        if rest and prefix.startswith(SESSIONS):
            starts = [f"{start}{_UNTIMED}", f"{start}{begun(rest)}"]
        stored = chain.from_iterable(self._inner.list_refs(each) for each in starts)
        return (ref for ref in self._opened(stored) if ref[0].startswith(prefix))

    def last_refs(self, prefix: str, before: str | None, most: int) -> tuple[tuple[str, bytes], ...]:
        """Of sessions no more are opened than were begun in the same seconds; of others all that begin with
        the same word, since how their sealed names sort says nothing."""
        check_prefix(prefix)
        if prefix.startswith(SESSIONS):
            found = self._last_sessions(prefix, before)
        else:
            found = iter(sorted(self.list_refs(prefix), reverse=True))
        return tuple(islice((ref for ref in found if before is None or ref[0] < before), most))

    def swap(
        self, name: str, old: bytes | None, new: bytes | None, guard: tuple[str, bytes] | None = None
    ) -> bool:
        """Compares contents, then swaps what was read: nobody changed it in between, or it begins again."""
        check_swap(name, old, new, guard, self._config.max_ref)
        asked = [name] if guard is None else [name, guard[0]]
        expected = [old] if guard is None else [old, guard[1]]
        while True:
            with self._keys.writing() as ciphers:
                stored_names = [ciphers.ref_name(each) for each in asked]
                found = self._read(stored_names)
                if [value for _, value in found] != expected:
                    return False
                sealed = None if new is None else ciphers.seal_ref(name, new)
                stored_guards = [
                    (stored_name, stored)
                    for stored_name, (stored, _) in zip(stored_names[1:], found[1:], strict=True)
                    if stored is not None
                ]
                stored_guard = stored_guards[0] if stored_guards else None
                if self._inner.swap(stored_names[0], found[0][0], sealed, stored_guard):
                    return True

    def hint(self, refs: Mapping[str, bytes]) -> None:
        check_refs(refs, self._config.max_ref)
        with self._keys.writing() as ciphers:
            self._inner.hint(_seal_refs(ciphers, refs))

    def reseal_refs(self) -> int:
        """Seal every ref anew that was by an older data key. Returns how many were."""
        resealed = 0
        for stored_name, stored in self._inner.list_refs(""):
            with self._keys.writing() as ciphers:
                if stored_name == MARKER or ciphers.is_newest_ref(stored):
                    continue
                opened = ciphers.open_ref(stored_name, stored)
                if opened is None:
                    raise _keys_gone(stored_name)
                # Where it moved on by now it was sealed with the newest key.
                resealed += self._inner.swap(stored_name, stored, ciphers.seal_ref(*opened))
        return resealed

    # --- the whole ----------------------------------------------------------------------------

    @property
    def rows_expire(self) -> bool:
        return self._inner.rows_expire

    def since(self) -> float | None:
        return self._inner.since()

    def now(self) -> float:
        return self._inner.now()

    def usage(self) -> int:
        return self._inner.usage()

    def tiers(self) -> tuple[TierInfo, ...]:
        return self._inner.tiers()

    def check_index(self) -> tuple[str, ...]:
        problems = list(self._inner.check_index())
        if problems:
            return tuple(problems)
        clear = sum(not is_sealed(info.blob) for info in self._inner.list_blobs())
        if clear:
            problems.append(f"{clear} blobs lie in the clear among sealed ones; nothing reads them")
        return (*problems, *self._damaged_refs())

    def rebuild(self, refs: Mapping[str, bytes]) -> None:
        check_refs(refs, self._config.max_ref)
        with self._keys.writing() as ciphers:
            self._inner.rebuild({MARKER: marker(ciphers), **_seal_refs(ciphers, refs)})

    def scoped(self, session: str) -> Store:
        if self._keys.scope is Scope.TENANT or session == self._session:
            return self
        return SealedStore(self._inner, self._keys, self._config, session)

    def wipe(self) -> None:
        """It stays a sealed one."""
        self._inner.wipe()
        with self._keys.writing() as ciphers:
            self._inner.swap(MARKER, None, marker(ciphers))

    def close(self) -> None:
        self._inner.close()

    # --- parts --------------------------------------------------------------------------------

    def _there(self, blob: BlobId, ciphers: Ciphers) -> Bytes | None:
        """What is stored as `blob`, if it is that and by the newest key, so that its age alone is renewed."""
        try:
            stored = self._inner.get(blob)
            found = read_blob(blob, stored)
            if not ciphers.is_newest(found):
                return None
            content = ciphers.open_blob(blob, found)
        except StateError:  # missing or damaged: it is written anew
            return None
        same = content is not None and ciphers.blob_id(blob_class(blob), content) == blob
        return stored if same else None

    def _read(self, stored_names: Sequence[str]) -> list[tuple[bytes | None, bytes | None]]:
        """What is stored under each name, and what it says."""
        for _ in range(_TRIES):
            ciphers = self._keys.current()
            stored = self._inner.read_many(stored_names)
            opened = [
                (value, None if value is None else ciphers.open_ref(stored_name, value))
                for stored_name, value in zip(stored_names, stored, strict=True)
            ]
            gone = [value is not None and ref is None for value, ref in opened]
            if not any(gone):
                return [(value, None if ref is None else ref[1]) for value, ref in opened]
        raise _keys_gone(stored_names[gone.index(True)])

    def _opened(self, stored: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
        ciphers = self._keys.current()
        for stored_name, value in stored:
            if stored_name == MARKER:
                continue
            ref = ciphers.open_ref(stored_name, value)
            if ref is None:  # sealed anew since, or by a process that has newer keys than we knew
                ciphers = self._keys.current()
                now = self._inner.read(stored_name)
                ref = None if now is None else ciphers.open_ref(stored_name, now)
                if ref is None and now is not None:
                    raise _keys_gone(stored_name)
            if ref is not None:
                yield ref

    def _last_sessions(self, prefix: str, before: str | None) -> Iterator[tuple[str, bytes]]:
        """Refs of sessions whose names begin with `prefix`, from the last one on, back."""
        word = self._keys.current().ref_start(SESSIONS.removesuffix("/"))
        untimed = sorted(self._opened(self._inner.list_refs(f"{word}{_UNTIMED}")), reverse=True)
        if before is not None and before <= SESSIONS:
            return iter(())
        until = None
        if before is not None and before.startswith(SESSIONS):
            until = f"{word}{begun(before.removeprefix(SESSIONS))}\x7f"
        timed = self._opened_by_time(word, f"{word}{begun(prefix.removeprefix(SESSIONS))}", until)
        found = merge(timed, untimed, reverse=True)
        return (ref for ref in found if ref[0].startswith(prefix))

    def _opened_by_time(self, word: str, start: str, until: str | None) -> Iterator[tuple[str, bytes]]:
        """Those of one second are opened together, since only their names tell their order."""
        stored = takewhile(lambda row: row[0][len(word)] != _UNTIMED, self._stored_back(start, until))
        for _, same in groupby(stored, lambda row: begun(row[0][len(word) :])):
            yield from sorted(self._opened(same), reverse=True)

    def _stored_back(self, start: str, before: str | None) -> Iterator[tuple[str, bytes]]:
        while True:
            page = self._inner.last_refs(start, before, _PAGE)
            yield from page
            if len(page) < _PAGE:
                return
            before = page[-1][0]

    def _damaged_refs(self) -> Iterator[str]:
        ciphers = self._keys.current()
        for stored_name, value in self._inner.list_refs(""):
            try:
                if stored_name != MARKER and ciphers.open_ref(stored_name, value) is None:
                    yield str(_keys_gone(stored_name))
            except IndexDamaged as error:
                yield str(error)


def marker(ciphers: Ciphers) -> bytes:
    """The value of the ref that tells a sealed store, and whose keys it needs."""
    return pack({"set": ciphers.set_id, "version": VERSION})


def _seal_refs(ciphers: Ciphers, refs: Mapping[str, bytes]) -> dict[str, bytes]:
    return {ciphers.ref_name(name): ciphers.seal_ref(name, value) for name, value in refs.items()}


def _keys_gone(stored_name: str) -> IndexDamaged:
    return IndexDamaged(
        f"ref {stored_name}: sealed with a key that is not here any more (check --repair rebuilds it)"
    )
