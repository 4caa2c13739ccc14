"""A session's records: the open handle of a writer, and what a reader is shown."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Protocol

from engine.errors import SessionNotFound, StaleSession, StoreError
from serialization.blobs import BlobId
from serialization.brought import Brought
from serialization.chunks import CHUNK_TOKENS
from serialization.manifest import Manifest, Origin
from serialization.replies import KeptReply
from sessions.catalog import Entry


class Holding(Protocol):
    """What a session is held by: a lease, that the writer has it alone."""

    def swap(self, name: str, old: bytes | None, new: bytes | None) -> bool: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Session:
    """An open session: its lease, and the stored turn it stands at (None before the first save).

    `synced` counts the leading tokens whose rows in the engine are bit for bit those of the stored chunks:
    only chunks below it may be kept by reference. Whoever rewinds or recomputes lowers it. `draft_synced`
    counts those whose rows in the drafter are. `unsure` is a turn whose commit was asked for and whose
    answer was lost. `note` is kept with the session, for whoever wrote it; `salt` is the one that its next
    turn has; `replies` are those that may be asked for again; `brought` says where it came from, if from
    another system.
    """

    id: str
    name: str | None
    title: str
    lease: Holding
    entry: Entry | None = None
    forked_from: Origin | None = None
    synced: int = 0
    draft_synced: int = 0
    unsure: Entry | None = None
    note: str | None = None
    salt: str | None = None
    replies: tuple[KeptReply, ...] = ()
    brought: Brought | None = None

    @property
    def manifest(self) -> Manifest | None:
        return self.entry.manifest if self.entry else None

    @property
    def chunk_tokens(self) -> int:
        """Of how many tokens the chunks of its next save are."""
        return self.entry.manifest.chunk_tokens if self.entry else CHUNK_TOKENS

    @property
    def generation(self) -> int:
        return self.entry.manifest.generation if self.entry else 0

    def stored(self, at: BlobId | None = None) -> Entry:
        """The turn that it stands at. Raises SessionNotFound before the first save, StaleSession unless that
        turn is `at`, where one is given."""
        if self.entry is None:
            raise SessionNotFound(f"session {self.id} was never saved")
        if at is not None and self.entry.blob != at:
            raise StaleSession(f"session {self.id} moved on since it was looked at")
        return self.entry

    def cut(self, length: int) -> None:
        """The rows beyond `length` tokens are no longer those that were stored."""
        self.synced = min(self.synced, length)
        self.draft_synced = min(self.draft_synced, length)

    def close(self) -> None:
        """Give the lease back. Where the store cannot be reached for that, the lease ends by itself."""
        with contextlib.suppress(StoreError):
            self.lease.close()


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """What `ls` shows of a session. Sizes are stored bytes: `own_bytes` are referenced by no other
    session or pin, `shared_bytes` by others too; None where all of the store was not gone through. Times are
    seconds since the epoch."""

    id: str
    name: str | None
    title: str
    parent: str | None
    model: str
    generation: int
    created: float
    updated: float
    length: int
    turns: int
    own_bytes: int | None
    shared_bytes: int | None
    pins: tuple[str, ...]
    expires: float | None


@dataclass(frozen=True, slots=True)
class Pin:
    """A turn kept under a name, out of reach of gc and TTL."""

    name: str
    session: str
    length: int
    created: float


@dataclass(frozen=True, slots=True)
class ExportInfo:
    """An archive that was written: its size, and the blobs of rows and point state in it."""

    nbytes: int
    num_blobs: int


@dataclass(frozen=True, slots=True)
class SaveResult:
    """One committed turn: what was written for it, encoded, and how long that took."""

    generation: int
    blobs_written: int
    bytes_written: int
    seconds: float
