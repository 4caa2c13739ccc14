"""What is asked of a migration, beside its two ends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

from serialization.blobs import Store
from serialization.manifest import Manifest
from sessions.migrate.carry import Conversion
from sessions.migrate.opening import Keys
from sessions.migrate.plan import Item
from sessions.migrate.survey import Clash
from sessions.policy import Policy

#: Opens the file or stream (None) that an archive, or a foreign file, is.
Opens = Callable[[Path | None], AbstractContextManager[BinaryIO]]


class Foreign(Protocol):
    """What reads and writes the files of other programs, with the model that was named."""

    def plan_read(self, path: Path) -> tuple[Item, ...]:
        """What `read` would make of a file. Raises as `read`, as far as it can be told from the file."""
        ...

    def read(self, path: Path, store: Store) -> Manifest:
        """The session that a file holds, by blobs of `store`. Raises StateError, ModelError, EngineError."""
        ...

    def plan_write(self, manifest: Manifest) -> tuple[Item, ...]:
        """What `write` would make of a session."""
        ...

    def write(self, manifest: Manifest, store: Store, out: BinaryIO) -> int:
        """Write the session for another program. Returns the number of bytes. Raises as `read`."""
        ...


@dataclass(frozen=True, slots=True)
class Request:
    """Whose sessions, and how. What `writing` opens appears at the end of its block, or not at all; `newest`
    writes manifests in the newest format, also where nothing else of them changes; `jobs` threads work at
    once on a whole store."""

    reading: Opens
    writing: Opens
    tenant: str = "default"
    keys: Keys = field(default_factory=Keys)
    policy: Policy = field(default_factory=Policy)
    clash: Clash = Clash.REFUSE
    conversion: Conversion | None = None
    newest: bool = False
    jobs: int = 8
    foreign: Foreign | None = None
