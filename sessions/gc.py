"""Garbage collection: what may go, said before it goes.

Only blobs are deleted that no ref needs *and* that are older than the grace; refs are read again just
before, and the store compares the age once more in the same step as the deletion. A blob that a save
puts at that moment is thereby younger, and stays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from engine.errors import LeaseHeld, SessionNotFound, StaleSession, StateError
from serialization.blobs import BlobClass, BlobId, BlobInfo, Store, blob_class
from serialization.manifest import Manifest
from sessions import names
from sessions.catalog import Catalog, is_there
from sessions.census import Census
from sessions.listing import usage
from sessions.newer import NEWER
from sessions.policy import Policy
from sessions.scratch import Rows, Scratch
from sessions.uses import USES, noted_uses


@dataclass(frozen=True, slots=True)
class GcPlan:
    """What `collect` would do: sessions to delete, sessions to strip of their rows, blobs to delete. They are
    read from a temporary file each time. `turn` tells where one of those sessions stood: one that was saved
    since is no longer old. `later_nbytes` are stored bytes that only those sessions need: a gc that comes
    after this one frees them, but for the logits that a session without rows keeps where it ends with some.
    """

    expired: Collection[str]
    released: Collection[str]
    blobs: Collection[BlobInfo]
    turn: Callable[[str], BlobId | None]
    later_nbytes: int

    @property
    def nbytes(self) -> int:
        """Stored bytes of the blobs that may go now."""
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
    census = Census(store, Catalog(store).entries())
    census.look()
    scratch, now = census.scratch, store.now()
    _count_uses(store, census)
    for statement in (
        "CREATE TABLE unneeded (blob TEXT, nbytes INT, age REAL)",
        "CREATE TABLE expired (session TEXT PRIMARY KEY) WITHOUT ROWID",
        "CREATE TABLE released (place INTEGER PRIMARY KEY, session TEXT UNIQUE)",
        "CREATE TABLE chosen (place INTEGER PRIMARY KEY, session TEXT)",
    ):
        scratch.do(statement)
    blobs = ((info.blob, info.nbytes, info.age) for info in census.unneeded(policy.grace))
    scratch.do_many("INSERT INTO unneeded VALUES (?, ?, ?)", blobs)
    if policy.session_ttl is not None:
        scratch.do(f"INSERT INTO expired {_OLDER}", now - policy.session_ttl)
    if policy.rows_ttl is not None:
        released = f"{_OLDER} AND rows AND session NOT IN expired ORDER BY session"
        scratch.do(f"INSERT INTO released (session) {released}", now - policy.rows_ttl)
    if policy.budget is not None:
        _release_over(census, policy.budget)
    return GcPlan(
        Rows(scratch, "SELECT session FROM expired ORDER BY session", _text),
        Rows(scratch, "SELECT session FROM released ORDER BY place", _text),
        Rows(scratch, "SELECT blob, nbytes, age FROM unneeded", _info),
        census.turn,
        scratch.number(_LATER),
    )


#: Bytes of blobs that are needed by sessions which are to go, or to give up their rows, and by no other.
_LATER = """
    SELECT SUM(nbytes) FROM stored WHERE EXISTS (SELECT 1 FROM uses WHERE uses.blob = stored.blob)
    AND NOT EXISTS (
        SELECT 1 FROM uses WHERE uses.blob = stored.blob AND session NOT IN expired
        AND session NOT IN (SELECT session FROM released)
    )
"""


def _count_uses(store: Store, census: Census) -> None:
    """Let a use that was noted count as much as a turn."""
    scratch = census.scratch
    scratch.do("CREATE TABLE noted (session TEXT PRIMARY KEY, at REAL) WITHOUT ROWID")
    scratch.do_many("INSERT OR REPLACE INTO noted VALUES (?, ?)", noted_uses(store))
    scratch.do(
        "UPDATE entry SET updated = (SELECT at FROM noted WHERE noted.session = entry.session) WHERE NOT pin"
        " AND updated < (SELECT at FROM noted WHERE noted.session = entry.session)"
    )


#: Sessions not used since a time, and not pinned.
_OLDER = """
    SELECT session FROM entry WHERE NOT pin AND updated < ?
    AND session NOT IN (SELECT session FROM entry WHERE pin)
"""


def _text(text: str) -> str:
    return text


def _info(blob: str, nbytes: int, age: float) -> BlobInfo:
    return BlobInfo(BlobId(blob), nbytes, age)


def _release_over(census: Census, budget: int) -> None:
    """Also release the sessions least recently used whose rows must go for the rest to fit the budget."""
    scratch = census.scratch
    scratch.do("CREATE TABLE left_uses AS SELECT * FROM uses")
    for gone in ("expired", "released"):
        scratch.do(f"DELETE FROM left_uses WHERE session IN (SELECT session FROM {gone})")
    for column in ("session", "blob"):
        scratch.do(f"CREATE INDEX left_{column} ON left_uses ({column})")
    total = scratch.number(
        f"SELECT SUM(nbytes) FROM stored WHERE blob NOT LIKE '{BlobClass.MANIFEST}-%'"
        " AND blob IN (SELECT blob FROM left_uses)"
    )
    oldest = scratch.rows(
        "SELECT session FROM entry WHERE NOT pin AND rows"
        " AND session NOT IN (SELECT session FROM entry WHERE pin)"
        " AND session NOT IN expired AND session NOT IN (SELECT session FROM released) ORDER BY updated"
    )
    for (session,) in oldest:
        if total <= budget:
            break
        total -= scratch.number(
            f"SELECT SUM(nbytes) FROM stored WHERE blob NOT LIKE '{BlobClass.MANIFEST}-%'"
            " AND blob IN (SELECT blob FROM left_uses WHERE session = ?)"
            " AND (SELECT COUNT(*) FROM left_uses WHERE left_uses.blob = stored.blob) = 1",
            session,
        )
        scratch.do("DELETE FROM left_uses WHERE session = ?", session)
        scratch.do("INSERT INTO chosen (session) VALUES (?)", session)
    scratch.do("INSERT INTO released (session) SELECT session FROM chosen ORDER BY place")


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
    expired = _each(plan.expired, plan.turn, delete, skipped)
    released = _each(plan.released, plan.turn, release, skipped)
    num_blobs = nbytes = 0
    with Census(store, Catalog(store).entries()) as census:
        for blob, size in _tombstones_last(store, plan.blobs):
            if not census.needs(blob) and store.delete_blob(blob, policy.grace):
                num_blobs, nbytes = num_blobs + 1, nbytes + size
        _drop_stale_hints(store, census)
    store.sweep(policy.grace)
    return GcResult(expired, released, tuple(skipped), num_blobs, nbytes)


def free(
    store: Store,
    policy: Policy,
    nbytes: int,
    delete: Callable[[str, BlobId], object],
    release: Callable[[str, BlobId], object],
) -> None:
    """Let the sessions least recently used give up rows, until about `nbytes` less are stored and the rest
    fits the policy's budget. Rows go at once where they are older than the grace."""
    rows = usage(store).rows_bytes
    budget = rows if policy.budget is None else min(rows, policy.budget)
    tighter = replace(policy, budget=max(0, min(budget, rows - nbytes)))
    for _ in range(2):  # what is given up in the first round is collected in the second
        collect(store, policy, plan_gc(store, tighter), delete, release)


def _each(
    sessions: Collection[str],
    turn: Callable[[str], BlobId | None],
    verb: Callable[[str, BlobId], object],
    skipped: list[str],
) -> tuple[str, ...]:
    done = []
    for session in sessions:
        stood = turn(session)
        if stood is None:
            continue
        try:
            verb(session, stood)
            done.append(session)
        except LeaseHeld:
            skipped.append(session)
        except (SessionNotFound, StaleSession):
            continue  # deleted by someone else since the plan was made, or saved, and so not old
    return tuple(done)


def _tombstones_last(store: Store, blobs: Collection[BlobInfo]) -> Iterator[tuple[BlobId, int]]:
    """Rows first, then manifests from old to new: while an older turn of a deleted session is there,
    so is the tombstone that outranks it. Each with its size. What a newer build wrote is not among them: that
    no ref names it is for that one to judge."""

    def rank(info: BlobInfo) -> tuple[int, int] | None:
        if blob_class(info.blob) is not BlobClass.MANIFEST:
            return 0, 0
        try:
            return 1, Manifest.decode(store.get(info.blob)).generation
        except NEWER:
            return None
        except StateError:
            return 0, 0

    with Scratch("CREATE TABLE going (blob TEXT, nbytes INT, kind INT, generation INT)") as scratch:
        ranked = ((info, rank(info)) for info in blobs)
        going = ((info.blob, info.nbytes, *place) for info, place in ranked if place is not None)
        scratch.do_many("INSERT INTO going VALUES (?, ?, ?, ?)", going)
        for blob, nbytes in scratch.rows("SELECT blob, nbytes FROM going ORDER BY kind, generation"):
            yield BlobId(blob), nbytes


def _drop_stale_hints(store: Store, census: Census) -> None:
    """Forget prefix hints, names and uses of sessions that are gone; one may have come since they were
    counted, and a leased one may be in its first save."""
    for prefix in (names.PREFIXES, names.NAMES):
        for ref, value in store.list_refs(prefix):
            session = value.decode()
            if not census.has_session(session) and not is_there(store, session):
                store.swap(ref, value, None)
    for ref, value in store.list_refs(USES):
        session = ref.removeprefix(USES)
        if not census.has_session(session) and not is_there(store, session):
            store.swap(ref, value, None)
