"""One session on its way: from a store, an archive or a foreign file to any of these."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import BinaryIO

from engine.errors import SessionExists
from serialization.archive import archive_nbytes, copy_archive, read_archive
from serialization.blobs import Store
from serialization.manifest import Manifest
from serialization.snapshot import verify_kept
from sessions import names
from sessions.catalog import Catalog, Entry
from sessions.manager import SessionManager
from sessions.migrate.carry import Conversion, Copies
from sessions.migrate.survey import Clash
from sessions.reduce import imported
from sessions.saving import export
from sessions.stores.disk import DiskStore

_STAGING = ".tenuto-staging-"


@dataclass(frozen=True, slots=True)
class Single:
    """A session at hand: its manifest, and the store of the blobs that it names."""

    manifest: Manifest
    store: Store


@contextmanager
def staging(beside: Path | None) -> Iterator[Store]:
    """An empty store in a folder (`beside` a file that is to be; else where temporary files go) that is gone
    at the end."""
    with (
        tempfile.TemporaryDirectory(prefix=_STAGING, dir=None if beside is None else beside.parent) as folder,
        closing(DiskStore(folder)) as store,
    ):
        yield store


@contextmanager
def staged_archive(src: BinaryIO, beside: Path | None) -> Iterator[Single]:
    """The session of an archive, all of it verified. Raises as `read_archive`."""
    with staging(beside) as store:
        yield Single(imported(read_archive(src, store)), store)


def archive_into_store(src: BinaryIO, manager: SessionManager, name: str | None, clash: Clash) -> Entry:
    """A new session from an archive, blob by blob as it comes; it appears when all of it was verified. `name`
    or, where that is None, the one that it has in the archive. Raises SessionExists for one that is taken
    before a blob is put (RENAME finds another, SKIP does without); as `read_archive`."""
    started, session = time.monotonic(), names.new_session_id()
    with ExitStack() as granted:
        chosen: list[str | None] = []

        def announced(manifest: Manifest) -> None:
            chosen.append(free_name(manager.store, name, manifest.name, clash))
            granted.enter_context(manager.room(archive_nbytes(manifest)))

        manifest = read_archive(src, manager.store.scoped(session), announced)
        _verify_slow(started, manifest, manager)
        return manager.commits.begin(imported(manifest), chosen[0], None, session)


def into_store(
    single: Single, manager: SessionManager, name: str | None, clash: Clash, conversion: Conversion | None
) -> Entry:
    """A new session with the past of `single`. Raises as `archive_into_store`."""
    started, session, manifest = time.monotonic(), names.new_session_id(), single.manifest
    chosen = free_name(manager.store, name, manifest.name, clash)
    with closing(Copies(single.store, manager.store, manager.policy.grace / 4)) as copies:
        nbytes = (
            copies.missing_nbytes(manifest, session)
            if conversion is None
            else conversion.most_nbytes(manifest)
        )
        with manager.room(nbytes):
            if conversion is None:
                manifest, _ = copies.copy(manifest, session)
            else:
                manifest = conversion.convert(manifest, single.store, manager.store.scoped(session))
                _verify_slow(started, manifest, manager)
            return manager.commits.begin(manifest, chosen, None, session)


def into_archive(single: Single, out: BinaryIO, conversion: Conversion | None, beside: Path | None) -> int:
    """Write one archive; what is converted is put aside first, since its names come first. Returns its size
    in bytes."""
    if conversion is None:
        return export(out, single.manifest, single.store).nbytes
    with staging(beside) as aside:
        return export(out, conversion.convert(single.manifest, single.store, aside), aside).nbytes


def archive_into_archive(src: BinaryIO, out: BinaryIO) -> int:
    """Verify an archive and write it again, in the newest format, as it comes. Returns its size in bytes."""
    return copy_archive(src, out)[1]


def _verify_slow(started: float, manifest: Manifest, manager: SessionManager) -> None:
    """Raises BlobMissing where gc met the first blobs of what was put for so long."""
    if time.monotonic() - started >= manager.policy.grace / 2:
        verify_kept(manager.store, manifest)


def free_name(store: Store, said: str | None, own: str | None, clash: Clash) -> str | None:
    """The name that a new session has: the one that was `said`, else its `own`. Raises SessionExists where it
    is taken, NameRefused."""
    name, catalog = said or own, Catalog(store)
    if name is None:
        return None
    try:
        catalog.check_free(name)
        return name
    except SessionExists:
        if clash is Clash.REFUSE or said is not None:
            raise
    if clash is Clash.SKIP:
        return None
    others = (f"{name[:56]}-{number}" for number in count(2))
    return next(each for each in others if catalog.named(each) is None)
