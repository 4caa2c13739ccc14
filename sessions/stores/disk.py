"""The embedded default: a folder, no server, many processes at once.

    ROOT/tenants/<tenant key>/index.sqlite                         refs (index.py)
    ROOT/tenants/<tenant key>/blobs/<class>/<digit>/<digest>       blobs (blobtree.py)

Folders are 0700 and files 0600. ROOT may be a symbolic link; nothing below it is ever followed.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from engine.errors import StoreUnavailable, UsageError
from serialization.blobs import BlobClass, BlobId, BlobInfo, Bytes, StrayInfo, TierInfo, parse_blob_id
from serialization.buffers import NEW, Buffers
from sessions.stores.base import StoreConfig, check_prefix, check_ref_name, check_refs, check_swap, tenant_key
from sessions.stores.blobtree import BlobTree, age_of, create_tree, stat_entry, unlink_old
from sessions.stores.folder import (
    FOLDER_FLAGS,
    TEMP_PREFIX,
    disk_errors,
    locked,
    make_folder,
    make_folders,
    opened_folder,
    sync_folder,
)
from sessions.stores.index import SET_ASIDE, RefIndex

TENANTS = "tenants"
BLOBS = "blobs"
_NEW_BLOBS = f"{TEMP_PREFIX}{BLOBS}"


class DiskStore:
    """See `serialization.blobs.Store`. `usage` is the sum of the sizes of the tenant's files."""

    def __init__(self, root: str | Path, tenant: str = "default", config: StoreConfig | None = None) -> None:
        """Opens the store, making it where there is none. Raises UsageError, NameRefused, StoreFull,
        StoreUnavailable."""
        self._config = config or StoreConfig()
        self._root = _expanded(root)
        self._tenant = tenant
        self._key = tenant_key(tenant)
        self._folder = self._root / TENANTS / self._key
        self._index = RefIndex(self._folder, self._config.busy_timeout)
        with disk_errors(f"opening the store in {self._root}"):
            self._blobs_fd: int | None = self._open_blobs()
        self._tree = BlobTree(self._blobs_fd, self._config)

    def __repr__(self) -> str:
        return f"DiskStore({str(self._root)!r}, tenant={self._tenant!r})"

    def _open_blobs(self) -> int:
        make_folders(self._root)
        root = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            make_folder(TENANTS, root)
            with opened_folder(TENANTS, root) as tenants:
                make_folder(self._key, tenants)
                with opened_folder(self._key, tenants) as tenant:
                    with locked(tenant):
                        if stat_entry(tenant, BLOBS) is None:
                            self._create(root, tenants, tenant)
                    with opened_folder(BLOBS, tenant) as blobs:
                        create_tree(blobs)  # whoever copied the store may have left empty folders behind
                    return os.open(BLOBS, FOLDER_FLAGS, dir_fd=tenant)
        finally:
            os.close(root)

    def _create(self, root: int, tenants: int, tenant: int) -> None:
        """The index first and the blobs' folder last: once that is there, a missing index is damage."""
        self._index.create()
        make_folder(_NEW_BLOBS, tenant)
        with opened_folder(_NEW_BLOBS, tenant) as blobs:
            create_tree(blobs)
        os.rename(_NEW_BLOBS, BLOBS, src_dir_fd=tenant, dst_dir_fd=tenant)
        for fd in (tenant, tenants, root):
            os.fsync(fd)
        with contextlib.suppress(PermissionError):  # a parent that we may enter but not list
            sync_folder(self._root.parent)

    def put(self, cls: BlobClass, data: Bytes) -> BlobId:
        return self._open_tree().put(cls, data)

    def put_as(self, blob: BlobId, data: Bytes) -> None:
        self._open_tree().put_as(blob, data)

    def get(self, blob: BlobId, buffers: Buffers = NEW) -> Bytes:
        return self._open_tree().get(blob, buffers)

    def get_anew(self, blob: BlobId) -> Bytes:
        """Nothing here is a copy."""
        return self.get(blob)

    def has(self, blobs: Sequence[BlobId]) -> tuple[bool, ...]:
        return self._open_tree().has(blobs)

    def refresh(self, blobs: Sequence[BlobId]) -> None:
        """Nothing vanishes by age here."""
        for blob in blobs:
            parse_blob_id(blob)

    def list_blobs(self) -> Iterator[BlobInfo]:
        return self._open_tree().list_blobs()

    def delete_blob(self, blob: BlobId, older_than: float) -> bool:
        return self._open_tree().delete_blob(blob, older_than)

    def list_stray(self) -> Iterator[StrayInfo]:
        yield from self._open_tree().list_stray()
        with self._opened_tenant() as tenant:
            yield from _left_in(tenant)

    def sweep(self, older_than: float) -> int:
        num_swept = self._open_tree().sweep(older_than)
        with self._opened_tenant() as tenant:
            num_swept += sum(unlink_old(tenant, stray.name, older_than) for stray in _left_in(tenant))
        return num_swept

    def read(self, name: str) -> bytes | None:
        return self.read_many([name])[0]

    def read_many(self, names: Sequence[str]) -> tuple[bytes | None, ...]:
        for name in names:
            check_ref_name(name)
        return self._index.read_many(names)

    def list_refs(self, prefix: str) -> Iterator[tuple[str, bytes]]:
        check_prefix(prefix)
        return self._index.list_refs(prefix)

    def last_refs(self, prefix: str, before: str | None, most: int) -> tuple[tuple[str, bytes], ...]:
        check_prefix(prefix)
        return self._index.last_refs(prefix, before, most)

    def swap(
        self, name: str, old: bytes | None, new: bytes | None, guard: tuple[str, bytes] | None = None
    ) -> bool:
        check_swap(name, old, new, guard, self._config.max_ref)
        return self._index.swap(name, old, new, guard)

    def hint(self, refs: Mapping[str, bytes]) -> None:
        check_refs(refs, self._config.max_ref)
        self._index.hint(refs)

    @property
    def rows_expire(self) -> bool:
        return False

    def since(self) -> float | None:
        return None

    def now(self) -> float:
        """This machine's clock: a folder is for the processes of one machine."""
        return time.time()

    def usage(self) -> int:
        with self._opened_tenant() as tenant:
            found = [stat_entry(tenant, name) for name in os.listdir(tenant)]
        ours = (status.st_size for status in found if status is not None and not stat.S_ISDIR(status.st_mode))
        return sum(ours) + self._open_tree().usage()

    def tiers(self) -> tuple[TierInfo, ...]:
        return (TierInfo("disk", self.usage(), None),)

    def check_index(self) -> tuple[str, ...]:
        return self._index.check()

    def rebuild(self, refs: Mapping[str, bytes]) -> None:
        check_refs(refs, self._config.max_ref)
        self._index.rebuild(refs)

    def scoped(self, session: str) -> DiskStore:
        return self

    def wipe(self) -> None:
        """The bytes are unlinked, not overwritten."""
        for info in self.list_blobs():
            self.delete_blob(info.blob, 0.0)
        self._index.rebuild({})
        self.sweep(0.0)
        with self._opened_tenant() as tenant:
            for name in os.listdir(tenant):
                if name.startswith(SET_ASIDE):
                    os.unlink(name, dir_fd=tenant)

    def close(self) -> None:
        self._index.close()
        if self._blobs_fd is not None:
            os.close(self._blobs_fd)
            self._blobs_fd = None

    def _open_tree(self) -> BlobTree:
        if self._blobs_fd is None:
            raise StoreUnavailable("this store was closed")
        return self._tree

    @contextlib.contextmanager
    def _opened_tenant(self) -> Iterator[int]:
        with disk_errors("looking through the store's folder"), opened_folder(self._folder) as fd:
            yield fd


def _expanded(root: str | Path) -> Path:
    try:
        return Path(root).expanduser().absolute()
    except RuntimeError as error:  # ~somebody, who is not there
        raise UsageError(f"{root}: {error}") from error


def _left_in(tenant: int) -> list[StrayInfo]:
    """Half-made indexes of processes that ended while they made one."""
    names = [name for name in os.listdir(tenant) if name.startswith(TEMP_PREFIX) and name != _NEW_BLOBS]
    found = [(name, stat_entry(tenant, name)) for name in names]
    return [StrayInfo(name, status.st_size, age_of(status)) for name, status in found if status is not None]
