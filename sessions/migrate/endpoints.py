"""What SRC and DST of a migration mean: each text means one thing, or is refused with what was understood.

    store:                    the store in use (--store)
    session:REF  pin:NAME     a session, or a kept turn, in the store in use
    STORE#REF  STORE#pin:NAME the same in another store; STORE alone is the whole of it
    archive:FILE  -           an archive; `-` is one that streams through stdin or stdout
    foreign:FILE              a file of another program

STORE is a folder, or an address with a scheme (`disk:`, `redis://`, …). Where no prefix says it, what lies
there does: a folder of a store, an archive by its first bytes, else a foreign file. What does not lie there
yet is told by its end: `/` is a folder for a new store, `.tenuto` an archive; a foreign file needs a format.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from engine.errors import UsageError
from serialization.prefix import MAGIC, Letter
from sessions.stores.base import printable
from sessions.stores.disk import TENANTS
from sessions.stores.open import SCHEMES

STREAM = "-"
SUFFIX = ".tenuto"

_SCHEME = re.compile(r"([a-z][a-z0-9+]+):")
_ARCHIVE = MAGIC + Letter.ARCHIVE.value
_HOW = (
    "a session is STORE#NAME or session:NAME, a store a folder or redis://…, an archive FILE.tenuto,"
    " a file of another program foreign:FILE"
)


@dataclass(frozen=True, slots=True)
class StoreEnd:
    """A whole store."""

    url: str

    def __str__(self) -> str:
        return f"the store {without_password(self.url)}"


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """One session in a store, or one of its turns: `ref` as `named_turn` takes it. As a destination, the name
    that a session is to have."""

    url: str
    ref: str

    @property
    def is_turn(self) -> bool:
        """Whether it is one turn of a session, and not the session."""
        return "@" in self.ref or self.ref.startswith("pin:")

    def __str__(self) -> str:
        return f"session {self.ref} in the store {without_password(self.url)}"


@dataclass(frozen=True, slots=True)
class ArchiveEnd:
    """A `.tenuto` file; None: stdin or stdout."""

    path: Path | None

    def __str__(self) -> str:
        return "an archive that streams" if self.path is None else f"the archive {self.path}"


@dataclass(frozen=True, slots=True)
class ForeignEnd:
    """A file (or folder) of another program."""

    path: Path

    def __str__(self) -> str:
        return f"the foreign file {self.path}"


Endpoint = StoreEnd | SessionEnd | ArchiveEnd | ForeignEnd


def source_of(text: str, in_use: str) -> Endpoint:
    """What `text` means as the source, where `in_use` is the address of the store in use. Looks at what lies
    there, and makes nothing. Raises UsageError."""
    said = _said(text, in_use)
    if said is not None:
        _refuse_absent(said)
        return said
    path = _path(text)
    if path.is_dir():
        return StoreEnd(text) if _is_store(path) else ForeignEnd(path)
    if path.is_file():
        return ArchiveEnd(path) if _begins_as_archive(path) else ForeignEnd(path)
    if path.exists():
        raise UsageError(f"{text} is no regular file; a stream is `-`")
    session = _session_in(text)
    if session is None:
        raise UsageError(f"there is no file or folder {printable(text)} ({_HOW})")
    _refuse_absent(session)
    return session


def target_of(text: str, in_use: str, foreign: bool = False) -> Endpoint:
    """What `text` means as the destination. `foreign` says that a format of another program was asked for.
    Raises UsageError."""
    said = _said(text, in_use)
    if said is not None:
        if foreign and not isinstance(said, ForeignEnd):
            raise UsageError(f"{said} is not of another program, and --to was said")
        return said
    path = _path(text)
    if foreign:
        return ForeignEnd(path)
    if path.is_dir():
        if _is_store(path) or next(path.iterdir(), None) is None:
            return StoreEnd(text)
        raise UsageError(f"{text} is a folder, and no store; disk:{text} makes one in it")
    if text.endswith("/"):
        return StoreEnd(text)
    if path.name.endswith(SUFFIX):
        return ArchiveEnd(path)
    if not path.exists():
        session = _session_in(text)
        if session is not None:
            return session
    raise UsageError(
        f"it is not clear what {printable(text)} is to be: FILE{SUFFIX} is an archive, FOLDER/ a new store,"
        " STORE#NAME a session, and with --to FORMAT it is a foreign file"
    )


def without_password(url: str) -> str:
    """The address as it may be told to others."""
    head, at, rest = url.rpartition("@")
    scheme, there, _ = head.partition("://")
    return f"{scheme}://{rest}" if at and there else url


def folder_of(url: str) -> Path | None:
    """The folder of a store on this disk; None for another kind."""
    found = _SCHEME.match(url)
    if found is None or found[1] == "disk":
        return _path(url.removeprefix("disk:"))
    return _path(unquote(urlsplit(url).path)) if found[1] == "file" else None


def _said(text: str, in_use: str) -> Endpoint | None:
    """What a text that says itself what it is means; None for a path."""
    if not text or "\0" in text:
        raise UsageError("an empty SRC or DST" if not text else "a path has no NUL character")
    if text == STREAM:
        return ArchiveEnd(None)
    if text == "store:":
        return StoreEnd(in_use)
    found = _SCHEME.match(text)
    if found is None:
        return None
    scheme, rest = found[1], text[found.end() :]
    if scheme in ("session", "pin", "archive", "foreign"):
        if not rest:
            raise UsageError(f"{text} says no {'file' if scheme in ('archive', 'foreign') else 'name'}")
        if scheme == "archive":
            return ArchiveEnd(_path(rest))
        if scheme == "foreign":
            return ForeignEnd(_path(rest))
        return SessionEnd(in_use, rest if scheme == "session" else text)
    if scheme == "store":
        raise UsageError(f"{text}: `store:` alone is the store in use; another one is its folder or address")
    if scheme not in SCHEMES:
        known = ", ".join(f"{each}:" for each in ("session", "pin", "archive", "foreign", *SCHEMES))
        raise UsageError(f"unknown kind {found[0]!r} (known: a path, {known})")
    if scheme == "memory":
        raise UsageError("what is in the memory of one process cannot be moved by another")
    if scheme == "disk" and _path(rest).is_dir():
        return StoreEnd(text)  # a folder may have a # in its name
    url, mark, ref = text.rpartition("#")
    if not mark:
        return StoreEnd(text)
    if not ref:
        raise UsageError(f"{text}: behind the # belongs a session")
    return SessionEnd(url, ref)


def _session_in(text: str) -> SessionEnd | None:
    """STORE#REF, where STORE is the folder of a store."""
    folder, mark, ref = text.rpartition("#")
    if not mark or not ref or not _is_store(_path(folder)):
        return None
    return SessionEnd(folder, ref)


def _refuse_absent(said: Endpoint) -> None:
    """A source that is opened is made where there is none, so it is looked for before."""
    if isinstance(said, ArchiveEnd | ForeignEnd):
        if said.path is not None and not said.path.exists():
            raise UsageError(f"there is no file {said.path}")
        return
    folder = folder_of(said.url)
    if folder is not None and not _is_store(folder):
        raise UsageError(f"there is no store in {folder}")


def _path(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # ~somebody, who is not there
        raise UsageError(f"{text}: {error}") from error


def _is_store(path: Path) -> bool:
    return (path / TENANTS).is_dir()


def _begins_as_archive(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_ARCHIVE)) == _ARCHIVE
