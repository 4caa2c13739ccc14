"""`check` reads every byte that a session needs and tells what is wrong; `repair` mends what can be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from engine.errors import BlobMissing, LeaseHeld, NameRefused, SessionNotFound, StateError
from serialization.blobs import BlobClass, BlobId, Store, blob_class, short
from serialization.chunks import read_header
from serialization.manifest import Manifest, ManifestKind
from serialization.resume import last_resumable
from sessions import names
from sessions.catalog import Catalog, Entry
from sessions.lease import acquire
from sessions.newer import NEWER
from sessions.prefix import PrefixIndex
from sessions.reduce import without
from sessions.scratch import Scratch

_VERDICTS = (
    "CREATE TABLE needed (blob TEXT PRIMARY KEY) WITHOUT ROWID",
    "CREATE TABLE verdict (blob TEXT PRIMARY KEY, nbytes INT, kind TEXT, message TEXT) WITHOUT ROWID",
)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong. `kind`: index, manifest, corrupt or missing; or newer, which is sound as far
    as this build can tell, and is left alone by every repair."""

    kind: str
    where: str
    message: str


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What `check` saw: problems, blobs and bytes read, and orphans (blobs no ref needs; gc's work).
    `repaired` says what `repair` did, a line each. `expired` blobs are gone where rows have a time to
    live: no problem, since the ids are there to be read again."""

    problems: tuple[Problem, ...]
    num_sessions: int
    num_blobs: int
    nbytes: int
    orphans: int
    repaired: tuple[str, ...] = ()
    expired: int = 0

    @property
    def clean(self) -> bool:
        return not self.problems


def check_store(store: Store) -> CheckReport:
    """Read everything that refs need; changes nothing."""
    damaged = store.check_index()
    if damaged:  # refs cannot be trusted, so nothing else can be judged by them
        lines = tuple(Problem("index", "index", line) for line in damaged)
        return CheckReport(lines, 0, 0, 0, 0)
    problems: list[Problem] = []
    with Scratch(*_VERDICTS) as scratch:
        sessions = entries = 0
        for entry in _entries(store, problems):
            entries += 1
            sessions += entry.ref.startswith(names.SESSIONS)
            scratch.do_many("INSERT OR IGNORE INTO needed VALUES (?)", ((blob,) for blob in entry.blobs()))
            of_draft = entry.manifest.of_draft()
            for ref in entry.manifest.blobs():
                kind, message = _verdict(store, scratch, ref.blob)
                if kind is not None and not (kind == "missing" and store.rows_expire):
                    whose = " (of its draft)" if ref.blob in of_draft else ""
                    problems.append(Problem(kind, entry.ref, f"{message}{whose}"))
        orphans = sum(
            scratch.row("SELECT 1 FROM needed WHERE blob = ?", info.blob) is None
            for info in store.list_blobs()
        )
        missing = scratch.number("SELECT COUNT(*) FROM verdict WHERE kind = 'missing'")
        expired = missing if store.rows_expire else 0
        verified = scratch.number("SELECT COUNT(*) FROM verdict") - expired
        nbytes = scratch.number("SELECT SUM(nbytes) FROM verdict")
    return CheckReport(tuple(problems), sessions, verified + entries, nbytes, orphans, expired=expired)


def _verdict(store: Store, scratch: Scratch, blob: BlobId) -> tuple[str | None, str]:
    """What is wrong with a blob, if anything: what kind of problem it is, and what to say. Read once."""
    known = scratch.row("SELECT kind, message FROM verdict WHERE blob = ?", blob)
    if known is not None:
        return known[0], known[1]
    error, nbytes = _verify(store, blob)
    kind = None if error is None else "missing" if isinstance(error, BlobMissing) else _kind(error, "corrupt")
    message = "" if error is None else str(error)
    scratch.do("INSERT INTO verdict VALUES (?, ?, ?, ?)", blob, nbytes, kind, message)
    return kind, message


def repair_store(store: Store, prefixes: PrefixIndex, holder: str) -> CheckReport:
    """Rebuild a damaged index from the manifests, and give up what is damaged: rows of a session from
    its first bad chunk on (ids and text stay), turns whose manifest is gone. Says all that it did. A session
    that somebody is writing to is left alone, and so is what a newer build stored; `holder` is whose lease
    the others are mended under. Raises UnknownVersion or UnknownFeature where the index is damaged and only
    a newer build can tell what belongs in it; nothing was changed then."""
    repaired: list[str] = []
    if store.check_index():
        found = rebuild_refs(store)
        if found.newer:
            raise _only_newer(found.newer)
        refs = found.refs
        store.rebuild(refs)
        count = sum(name.startswith(names.SESSIONS) for name in refs)
        repaired.append(f"rebuilt the index from the manifests: {count} sessions")
        repaired += found.lost
        for ref, value in refs.items():
            if ref.startswith(names.SESSIONS):
                prefixes.add(Catalog(store).read_entry(ref, value).manifest, 0)
    unreadable: list[Problem] = []
    for _ in _entries(store, unreadable):
        pass
    damaged = [problem.where for problem in unreadable if problem.kind == "manifest"]
    if damaged:
        repaired += _go_back(store, damaged, holder)
    for entry in _entries(store, []):
        repaired += _mend(store, entry, holder)
    return replace(check_store(store), repaired=tuple(repaired))


@dataclass(frozen=True, slots=True)
class RebuiltRefs:
    """The refs that the manifests call for: of every session and pin the last one. `lost` is what could not
    be read, a line each, and `newer` why a newer build's manifests could not be."""

    refs: Mapping[str, bytes]
    lost: tuple[str, ...]
    newer: tuple[StateError, ...]


def _only_newer(errors: Sequence[StateError]) -> StateError:
    """Of the kind of the first of `errors`."""
    return type(errors[0])(
        f"the index is damaged, and a newer tenuto wrote {len(errors)} of the manifests that it must be built"
        f" of: repair it with that one ({errors[0]}); nothing was changed"
    )


def rebuild_refs(store: Store) -> RebuiltRefs:
    """Reads every manifest."""
    last: dict[str, tuple[tuple[int, float], BlobId, Manifest]] = {}
    lost: list[str] = []
    newer: list[StateError] = []
    for info in store.list_blobs():
        if blob_class(info.blob) is not BlobClass.MANIFEST:
            continue
        try:
            manifest = Manifest.decode(store.get(info.blob))
        except NEWER as error:
            newer.append(error)
            continue
        except StateError as error:
            lost.append(f"{short(info.blob)} left out: {error}")
            continue
        try:
            ref = _ref_of(manifest)
        except NameRefused as error:
            lost.append(f"{short(info.blob)} left out: {error}")
            continue
        # A pin's generation is its session's, so pins of one name are ordered by time alone.
        rank = (manifest.generation if manifest.pin is None else 0, manifest.updated)
        if ref not in last or rank > last[ref][0]:
            last[ref] = (rank, info.blob, manifest)
    refs: dict[str, bytes] = {}
    for ref, (_, blob, manifest) in sorted(last.items(), key=lambda item: item[1][2].updated):
        if manifest.kind is ManifestKind.TOMBSTONE:
            continue
        refs[ref] = blob.encode()
        if manifest.pin is None and manifest.name is not None:
            refs[names.name_ref(manifest.name)] = manifest.session.encode()
    return RebuiltRefs(refs, tuple(lost), tuple(newer))


def _ref_of(manifest: Manifest) -> str:
    """Raises NameRefused: a manifest may come from anywhere."""
    if manifest.name is not None:
        names.check_name(manifest.name)
    if manifest.pin is not None:
        return names.pin_ref(names.check_name(manifest.pin))
    return names.session_ref(manifest.session)


def _entries(store: Store, problems: list[Problem]) -> Iterator[Entry]:
    catalog = Catalog(store)
    for prefix in (names.SESSIONS, names.PINS):
        for ref, value in store.list_refs(prefix):
            try:
                entry = catalog.read_entry(ref, value)
            except StateError as error:
                problems.append(Problem(_kind(error, "manifest"), ref, str(error)))
                continue
            expected = names.session_ref(entry.manifest.session)
            if prefix == names.SESSIONS and ref != expected:
                problems.append(Problem("manifest", ref, f"its manifest belongs to {expected}"))
            yield entry


def _go_back(store: Store, damaged: list[str], holder: str) -> list[str]:
    """Point each of the `damaged` refs, whose manifest is no longer what it should be, to the last that is
    there. Sound refs stay: a manifest that no ref ever named is not preferred to one. Says what is lost.

    Where a newer build stored manifests, the last one may be among them, and all are left alone."""
    found = rebuild_refs(store)
    if found.newer:
        why = f"a newer tenuto wrote {len(found.newer)} manifests, of which one may be its last turn"
        return [f"{ref} was left alone: {why} ({found.newer[0]})" for ref in damaged]
    refs, told = found.refs, list(found.lost)
    for ref in damaged:
        old, new = store.read(ref), refs.get(ref)
        session = ref.removeprefix(names.SESSIONS)
        try:
            with acquire(store, session, holder) if ref.startswith(names.SESSIONS) else nullcontext():
                done = store.swap(ref, old, new)
        except LeaseHeld as error:
            told.append(f"{ref} was left alone: {error}")
            continue
        if not done:
            told.append(f"{ref} changed while it was repaired; check again")
        elif new is None:
            told.append(f"{ref} is lost: its manifest cannot be read, and there is no older one")
        else:
            turn = Catalog(store).read_entry(ref, new).manifest.generation
            told.append(f"{ref} is back at turn {turn}, the last that can be read")
    return told


def _kind(error: StateError, otherwise: str) -> str:
    return "newer" if isinstance(error, NEWER) else otherwise


def _verify(store: Store, blob: BlobId) -> tuple[StateError | None, int]:
    try:
        data = store.get(blob)
        read_header(data)
    except StateError as error:
        return error, 0
    return None, len(data)


def _mend(store: Store, entry: Entry, holder: str) -> list[str]:
    """Give up what is damaged of a pin, or of a session that nobody is writing to."""
    if not _damaged(store, entry):
        return []
    if not entry.ref.startswith(names.SESSIONS):
        return _give_up_damaged(store, entry)
    session = entry.ref.removeprefix(names.SESSIONS)
    try:
        with acquire(store, session, holder):
            return _give_up_damaged(store, Catalog(store).session(session))
    except LeaseHeld as error:
        return [f"{entry.ref} was left alone: {error}"]
    except SessionNotFound:
        return []  # deleted by now


def _damaged(store: Store, entry: Entry) -> set[BlobId]:
    """What is missing or is not what was written. A codec or a version that is not known is neither."""
    verdicts = ((ref.blob, _verify(store, ref.blob)[0]) for ref in entry.manifest.blobs())
    return {blob for blob, error in verdicts if not (error is None or isinstance(error, NEWER))}


def _give_up_damaged(store: Store, entry: Entry) -> list[str]:
    """Cut the entry's rows before its first damaged blob, and give up a draft that has one."""
    bad = _damaged(store, entry)
    if not bad:
        return []
    whole = without(entry.manifest, bad)
    fixed = replace(whole, generation=entry.manifest.generation + 1, parent=entry.blob, updated=store.now())
    blob = store.scoped(fixed.session).put(BlobClass.MANIFEST, fixed.encode())
    if not store.swap(entry.ref, entry.blob.encode(), blob.encode()):
        return [f"{entry.ref} changed while it was repaired; check again"]
    if bad <= entry.manifest.of_draft():
        return [f"{entry.ref}: {len(bad)} damaged blobs of its draft given up with it; nothing else is lost"]
    kept = last_resumable(whole, whole.length)
    return [f"{entry.ref}: {len(bad)} damaged blobs given up; rows of {kept:,} tokens and all text kept"]
