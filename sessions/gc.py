"""Garbage collection: what may go, said before it goes.

Only blobs are deleted that no ref needs *and* that are older than the grace; refs are read again just
before, and the store compares the age once more in the same step as the deletion. A blob that a save
puts at that moment is thereby younger, and stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from engine.errors import LeaseHeld, SessionNotFound, StaleSession, StateError
from serialization.blobs import BlobClass, BlobId, BlobInfo, Store, blob_class
from serialization.manifest import Manifest
from sessions import names
from sessions.catalog import Catalog, Contents, is_there
from sessions.policy import Policy
from sessions.reduce import has_rows


@dataclass(frozen=True, slots=True)
class GcPlan:
    """What `collect` would do: sessions to delete, sessions to strip of their rows, blobs to delete.
    `turns` is where those sessions stood: one that was saved since is no longer old."""

    expired: tuple[str, ...]
    released: tuple[str, ...]
    blobs: tuple[BlobInfo, ...]
    turns: Mapping[str, BlobId] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Stored bytes of the blobs that may go now; rows given up follow after their grace."""
        return sum(info.nbytes for info in self.blobs)


@dataclass(frozen=True, slots=True)
class GcResult:
    """What was done. `skipped` sessions were being written to."""

    expired: tuple[str, ...]
    released: tuple[str, ...]
    skipped: tuple[str, ...]
    num_blobs: int
    nbytes: int


def plan_gc(store: Store, policy: Policy) -> GcPlan:
    """Raises StateError if a manifest cannot be read: nothing is deleted on a guess."""
    contents = Catalog(store).contents().whole()
    now = store.now()
    pinned = {entry.manifest.session for entry in contents.pins.values()}
    age = {name: now - entry.manifest.updated for name, entry in contents.sessions.items()}
    expired = _older(age, policy.session_ttl, pinned)
    released = [
        name for name in _older(age, policy.rows_ttl, pinned) if has_rows(contents.sessions[name].manifest)
    ]
    infos = list(store.list_blobs())
    gone = {*expired, *released}
    released += _over_budget(contents, infos, policy, gone | pinned, gone)
    referenced = contents.referenced()
    blobs = tuple(i for i in infos if i.blob not in referenced and i.age >= policy.grace)
    released = [name for name in released if name not in expired]
    turns = {name: contents.sessions[name].blob for name in (*expired, *released)}
    return GcPlan(tuple(expired), tuple(released), blobs, turns)


def collect(
    store: Store,
    policy: Policy,
    plan: GcPlan,
    delete: Callable[[str, BlobId], object],
    release: Callable[[str, BlobId], object],
) -> GcResult:
    """Carry `plan` out; `delete` and `release` raise StaleSession for a session that is not at the given
    turn. What changed since it was made is left alone."""
    skipped: list[str] = []
    expired = _each(plan.expired, plan.turns, delete, skipped)
    released = _each(plan.released, plan.turns, release, skipped)
    referenced = Catalog(store).contents().whole().referenced()
    num_blobs = nbytes = 0
    for info in _tombstones_last(store, plan.blobs):
        if info.blob not in referenced and store.delete_blob(info.blob, policy.grace):
            num_blobs, nbytes = num_blobs + 1, nbytes + info.nbytes
    _drop_stale_hints(store)
    store.sweep(policy.grace)
    return GcResult(expired, released, tuple(skipped), num_blobs, nbytes)


def _older(age: dict[str, float], ttl: float | None, spared: set[str]) -> list[str]:
    return [] if ttl is None else sorted(s for s, old in age.items() if old > ttl and s not in spared)


def _over_budget(
    contents: Contents, infos: list[BlobInfo], policy: Policy, spared: set[str], gone: set[str]
) -> list[str]:
    """The sessions least recently saved whose rows must go for the rest to fit the budget."""
    if policy.budget is None:
        return []
    sizes = {info.blob: info.nbytes for info in infos}
    users: dict[BlobId, set[str]] = {}
    for entry in contents.entries():
        for ref in entry.manifest.blobs():
            users.setdefault(ref.blob, set()).add(entry.manifest.session)
    for owners in users.values():
        owners -= gone
    total = sum(sizes.get(blob, 0) for blob, owners in users.items() if owners)
    released: list[str] = []
    oldest = sorted(contents.sessions, key=lambda s: contents.sessions[s].manifest.updated)
    for session in oldest:
        if total <= policy.budget:
            break
        manifest = contents.sessions[session].manifest
        if session in spared or not has_rows(manifest):
            continue
        released.append(session)
        for ref in manifest.blobs():
            if session in users[ref.blob]:
                users[ref.blob].discard(session)
                total -= 0 if users[ref.blob] else sizes.get(ref.blob, 0)
    return released


def _each(
    sessions: tuple[str, ...],
    turns: Mapping[str, BlobId],
    verb: Callable[[str, BlobId], object],
    skipped: list[str],
) -> tuple[str, ...]:
    done = []
    for session in sessions:
        try:
            verb(session, turns[session])
            done.append(session)
        except LeaseHeld:
            skipped.append(session)
        except (SessionNotFound, StaleSession):
            continue  # deleted by someone else since the plan was made, or saved, and so not old
    return tuple(done)


def _tombstones_last(store: Store, blobs: tuple[BlobInfo, ...]) -> list[BlobInfo]:
    """Rows first, then manifests from old to new: while an older turn of a deleted session is there,
    so is the tombstone that outranks it."""

    def rank(info: BlobInfo) -> tuple[int, int]:
        if blob_class(info.blob) is not BlobClass.MANIFEST:
            return 0, 0
        try:
            return 1, Manifest.decode(store.get(info.blob)).generation
        except StateError:
            return 0, 0

    return sorted(blobs, key=rank)


def _drop_stale_hints(store: Store) -> None:
    """Forget prefix hints and names of sessions that are gone; one may have come since they were listed,
    and a leased one may be in its first save."""
    live = {ref.removeprefix(names.SESSIONS).encode() for ref, _ in store.list_refs(names.SESSIONS)}
    for prefix in (names.PREFIXES, names.NAMES):
        for ref, value in list(store.list_refs(prefix)):
            if value not in live and not is_there(store, value.decode()):
                store.swap(ref, value, None)
