"""The migration of one session, between a store, an archive and a foreign file, each to each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from engine.errors import UsageError
from serialization.archive import archived
from serialization.manifest import Manifest
from sessions.catalog import Entry
from sessions.manager import SessionManager
from sessions.migrate.endpoints import ArchiveEnd, Endpoint, ForeignEnd, SessionEnd, StoreEnd
from sessions.migrate.moved import Moved, Progress, Told
from sessions.migrate.opening import Opening, open_source
from sessions.migrate.plan import Fate, Item, Plan
from sessions.migrate.request import Foreign, Request
from sessions.migrate.singles import (
    Single,
    archive_into_archive,
    archive_into_store,
    into_archive,
    into_store,
    staged_archive,
    staging,
)
from sessions.named_turn import named_turn
from sessions.reduce import has_rows


class OneSession:
    """Nothing is opened before it is asked to do something."""

    def __init__(self, source: Endpoint, target: Endpoint, request: Request, opening: Opening) -> None:
        self._source = source
        self._target = target
        self._request = request
        self._opening = opening

    def plan(self) -> Plan:
        """Reads no more than the session's manifest, or what tells a foreign file."""
        match self._source:
            case ForeignEnd(path):
                items = (*self._foreign().plan_read(path), *self._to(None))
                return self._planned(items, path.stat().st_size)
            case ArchiveEnd(path):
                with self._request.reading(path) as src:
                    manifest = archived(src)
                left = Item(Fate.DROPPED, "session id", 1, "a session from an archive is a new one")
                return self._planned((*self._kept(manifest), left, *self._to(manifest)), _nbytes(manifest))
            case SessionEnd():
                with self._turn() as single:
                    manifest = single.manifest
                return self._planned((*self._kept(manifest), *self._to(manifest)), _nbytes(manifest))
            case StoreEnd():
                raise self._refused()

    def run(self, told: Told = lambda progress: None) -> Moved:
        """Do it. What fails leaves nothing behind but blobs for gc."""
        moved = self._run()
        told(Progress(1, 1, moved.nbytes))
        return moved

    # --- doing --------------------------------------------------------------------------------

    def _run(self) -> Moved:
        request = self._request
        if isinstance(self._source, ArchiveEnd) and request.conversion is None:
            match self._target:
                case ArchiveEnd(path):
                    with request.reading(self._source.path) as src, request.writing(path) as out:
                        return Moved(num_sessions=1, nbytes=archive_into_archive(src, out))
                case StoreEnd() | SessionEnd():
                    with request.reading(self._source.path) as src, self._manager(self._target) as manager:
                        return _moved(archive_into_store(src, manager, self._name, request.clash))
        with self._single() as single:
            return self._put(single)

    @contextmanager
    def _single(self) -> Iterator[Single]:
        match self._source:
            case SessionEnd():
                with self._turn() as single:
                    yield single
            case ArchiveEnd(path):
                with self._request.reading(path) as src, staged_archive(src, self._beside) as single:
                    yield single
            case ForeignEnd(path):
                with staging(self._beside) as store:
                    yield Single(self._foreign().read(path, store), store)
            case StoreEnd():
                raise self._refused()

    def _put(self, single: Single) -> Moved:
        request = self._request
        match self._target:
            case StoreEnd() | SessionEnd():
                with self._manager(self._target) as manager:
                    return _moved(into_store(single, manager, self._name, request.clash, request.conversion))
            case ArchiveEnd(path):
                with request.writing(path) as out:
                    nbytes = into_archive(single, out, request.conversion, path)
                return Moved(num_sessions=1, nbytes=nbytes)
            case ForeignEnd(path):
                return self._put_foreign(single, path)

    def _put_foreign(self, single: Single, path: Path) -> Moved:
        request = self._request
        with staging(path) as aside, request.writing(path) as out:
            manifest, store = single.manifest, single.store
            if request.conversion is not None:
                manifest, store = request.conversion.convert(manifest, store, aside), aside
            return Moved(num_sessions=1, nbytes=self._foreign().write(manifest, store, out))

    @contextmanager
    def _turn(self) -> Iterator[Single]:
        assert isinstance(self._source, SessionEnd)
        request = self._request
        with closing(open_source(self._source.url, request.tenant, request.keys)) as store:
            yield Single(named_turn(store, self._source.ref), store)

    @contextmanager
    def _manager(self, target: StoreEnd | SessionEnd) -> Iterator[SessionManager]:
        request = self._request
        with closing(self._opening(target.url, request.tenant, request.keys)) as store:
            yield SessionManager(store, None, request.policy, tenant=request.tenant)

    @property
    def _name(self) -> str | None:
        """The name that was said for the session that is to be."""
        return self._target.ref if isinstance(self._target, SessionEnd) else None

    @property
    def _beside(self) -> Path | None:
        """The file that is to be, beside which there is room for what is put aside."""
        return self._target.path if isinstance(self._target, ArchiveEnd | ForeignEnd) else None

    def _foreign(self) -> Foreign:
        if self._request.foreign is None:
            raise UsageError("a file of another program says nothing of its model: name it with -m")
        return self._request.foreign

    def _refused(self) -> UsageError:
        return UsageError(f"{self._source} cannot become {self._target}: name one session of it, STORE#NAME")

    # --- telling ------------------------------------------------------------------------------

    def _planned(self, items: tuple[Item, ...], nbytes: int) -> Plan:
        ends = str(self._source), str(self._target)
        return Plan(*ends, self._request.tenant, tuple(item for item in items if item.count), 1, nbytes)

    def _kept(self, manifest: Manifest) -> Iterator[Item]:
        yield Item(Fate.KEPT, "tokens", manifest.length, "their ids, and the text of all messages")
        refs = list(manifest.blobs())
        if not has_rows(manifest):
            yield Item(Fate.RECOMPUTED, "tokens", manifest.length, "no rows are stored: they are read again")
            return
        converted = self._request.conversion is not None
        why = "each checked on its way" if not converted else "each checked, and then converted"
        yield Item(Fate.KEPT, "blobs of rows and states", len(refs), why, sum(ref.nbytes for ref in refs))

    def _to(self, manifest: Manifest | None) -> Iterator[Item]:
        """What the destination makes of it."""
        if self._request.conversion is not None and manifest is not None:
            yield from self._request.conversion.plan(manifest)
        match self._target:
            case ForeignEnd() if manifest is not None:
                yield from self._foreign().plan_write(manifest)
            case StoreEnd() | SessionEnd() if manifest is not None:
                own = len(manifest.replies) + (manifest.note is not None)
                if own:
                    yield Item(Fate.DROPPED, "note and kept replies", own, "a new session has none yet")
            case ArchiveEnd() if manifest is not None and manifest.salt is not None:
                yield Item(Fate.DROPPED, "salt", 1, "an archive is for others to read")
            case _:
                return


def _nbytes(manifest: Manifest) -> int:
    return sum(ref.nbytes for ref in manifest.blobs())


def _moved(entry: Entry) -> Moved:
    manifest = entry.manifest
    return Moved(num_sessions=1, nbytes=_nbytes(manifest), session=manifest.session)
