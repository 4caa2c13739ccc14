"""Does what arrived still mean what it says? Asked at the destination, as `sessions.verify` asks it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from engine.errors import EngineError, NoCheckpoint, StateError, UsageError
from engine.verbs import Verbs
from serialization.archive import read_archive
from serialization.blobs import Store
from serialization.manifest import Manifest
from sessions import names
from sessions.catalog import Catalog
from sessions.migrate.endpoints import ArchiveEnd, Endpoint, SessionEnd, StoreEnd
from sessions.migrate.journal import Journal, source_tag
from sessions.migrate.moved import Moved
from sessions.migrate.opening import canonical, open_target
from sessions.migrate.request import Request
from sessions.migrate.singles import staging
from sessions.verify import Verification, verify


@dataclass(frozen=True, slots=True)
class Asked:
    """One session that was asked, and what came of it; or why it could not be."""

    session: str
    found: Verification | None
    why: str = ""


def drawn(store: Store, tag: bytes, count: int, seed: int) -> list[str]:
    """At most `count` of the sessions that came from the source `tag`, drawn evenly by `seed`."""
    chance, kept = random.Random(seed), list[str]()
    seen = 0
    for _, line in Journal(store).of(tag):
        if not line.ref.startswith(names.SESSIONS):
            continue
        seen += 1
        if len(kept) < count:
            kept.append(line.ref)
        elif (place := chance.randrange(seen)) < count:
            kept[place] = line.ref
    return sorted(ref.removeprefix(names.SESSIONS) for ref in kept)


def verified(
    source: Endpoint,
    target: Endpoint,
    request: Request,
    moved: Moved,
    count: int,
    limit: float,
    load: Callable[[Manifest], Verbs],
    seed: int = 0,
) -> Iterator[Asked]:
    """Ask at `count` lengths of the session that was made; of a whole store at one of each of `count`
    sessions. `load` makes the engine that can hold a session twice. One session that cannot be asked (of
    another model, or without rows) does not hide the others. Raises UsageError for a destination that has
    gone by, or is another program's."""
    match target:
        case StoreEnd() | SessionEnd():
            with closing(open_target(target.url, request.tenant, request.keys)) as store:
                catalog = Catalog(store)
                if moved.session is not None:
                    sessions, lengths = [moved.session], count
                elif isinstance(source, StoreEnd):
                    tag = source_tag(canonical(source.url), request.tenant)
                    sessions, lengths = drawn(store, tag, count, seed), 1
                else:
                    sessions, lengths = [], count
                manifests = [catalog.session(session).manifest for session in sessions]
                if manifests:
                    engine = load(max(manifests, key=lambda manifest: manifest.length))
                for manifest in manifests:
                    yield _asked(engine, store, manifest, lengths, limit, seed)
        case ArchiveEnd(Path() as path):
            with path.open("rb") as file, staging(path) as store:
                manifest = read_archive(file, store)
                yield _asked(load(manifest), store, manifest, count, limit, seed)
        case _:
            raise UsageError(f"{target} cannot be read again, so that nothing can be verified there")


def _asked(engine: Verbs, store: Store, manifest: Manifest, count: int, limit: float, seed: int) -> Asked:
    try:
        return Asked(manifest.session, verify(engine, store, manifest, count, limit, seed))
    except (StateError, NoCheckpoint, EngineError) as error:
        return Asked(manifest.session, None, str(error))
