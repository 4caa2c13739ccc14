"""A whole store arrives as it was: every session once, by its id and names, and the source stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from engine.errors import BlobMissing, ConfigError, QuotaExceeded, SessionExists, StoreFull, StoreUnavailable
from serialization.blobs import BlobClass, BlobId, Bytes, Store, verify_blob
from serialization.buffers import NEW, Buffers
from serialization.manifest import Manifest
from serialization.reencode.reencoding import Reencoding
from sessions import names, salts
from sessions.catalog import Catalog
from sessions.keyring.keyset import Scope
from sessions.lease import acquire
from sessions.manager import SessionManager
from sessions.migrate.journal import JOURNAL
from sessions.migrate.plan import Fate
from sessions.migrate.reencoded import Reencoded
from sessions.migrate.survey import Clash
from sessions.policy import Policy
from sessions.stores.memory import MemoryStore
from sessions.stores.open import open_store
from sessions.uses import USES
from tests.faults import FaultyStore, flip
from tests.redis_server import RedisServer
from tests.serialization.states import ATTENTION
from tests.sessions.migrate.places import (
    TAG,
    archives,
    blobs,
    check_clean,
    fill,
    migration,
    needed,
    put_session,
    refs,
    turn,
)
from tests.sessions.sealing import ring

KEPT = (names.SESSIONS, names.PINS, names.NAMES, USES)


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with RedisServer() as server:
        yield server.url


def made(kind: str, folder: Path, redis_url: str) -> Store:
    match kind:
        case "memory":
            return MemoryStore()
        case "disk":
            return open_store(str(folder / "store"))
        case "redis":
            store = open_store(redis_url)
            store.wipe()
            return store
        case "sealed":
            return open_store(str(folder / "store"), keyring=ring(folder / "keys"))
        case _:
            return open_store(str(folder / "store"), keyring=ring(folder / "keys", Scope.SESSION))


KINDS = ("memory", "disk", "redis", "sealed", "sealed by session")


@pytest.mark.redis
@pytest.mark.parametrize("kind", KINDS)
def test_everything_arrives_as_it_was(kind: str, tmp_path: Path, redis_url: str) -> None:
    source = MemoryStore()
    fill(source)
    before = blobs(source), refs(source, "")
    with closing(made(kind, tmp_path, redis_url)) as target:
        with migration(source, target) as moving:
            moved = moving.run()
        assert (moved.num_sessions, moved.num_pins, moved.problems) == (4, 1, [])
        assert archives(target) == archives(source)
        assert refs(target, names.NAMES).items() <= refs(source, names.NAMES).items()
        assert refs(target, USES) == refs(source, USES) != {}
        assert set(refs(target, names.NAMES)) == {"name/tea", "name/tea-again", "name/own"}
        assert refs(target, names.PREFIXES).keys() == refs(source, names.PREFIXES).keys()
        check_clean(target)
    assert (blobs(source), refs(source, "")) == before


@pytest.mark.redis
@pytest.mark.parametrize("kind", KINDS)
def test_and_back_it_is_the_same_byte_for_byte(kind: str, tmp_path: Path, redis_url: str) -> None:
    source, back = MemoryStore(), MemoryStore()
    fill(source)
    with closing(made(kind, tmp_path, redis_url)) as between:
        for one, other in ((source, between), (between, back)):
            with migration(one, other) as moving:
                moving.run()
    if kind.startswith("sealed"):  # other names of blobs on the way leave another name of the earlier turn
        assert archives(back) == archives(source)
    else:
        assert refs(back, *KEPT).items() <= refs(source, *KEPT).items()
        assert set(blobs(back)) == needed(source)


def test_what_sessions_share_is_stored_once() -> None:
    source, target = MemoryStore(), MemoryStore()
    fill(source)
    with migration(source, target) as moving:
        moving.run()
    assert set(blobs(target)) == needed(source)
    assert len(needed(source)) < sum(len(list(entry.blobs())) for entry in Catalog(source).entries())


def test_a_second_run_does_nothing_and_says_so() -> None:
    source, target = MemoryStore(), MemoryStore()
    fill(source)
    with migration(source, target) as moving:
        moving.run()
    there = blobs(target), refs(target, "")
    with migration(source, target) as moving:
        again = moving.run()
    assert (again.before, again.num_sessions, again.num_pins, again.nbytes) == (5, 0, 0, 0)
    assert (blobs(target), refs(target, "")) == there


def test_the_plan_says_what_becomes_of_everything_and_changes_nothing() -> None:
    source, target = MemoryStore(), MemoryStore()
    fill(source)
    with migration(source, target) as moving:
        plan = moving.plan()
    assert not blobs(target)
    assert not refs(target, "")
    said = {(item.fate, item.what): item.count for item in plan.items}
    assert said == {
        (Fate.KEPT, "sessions"): 4,
        (Fate.KEPT, "kept turns"): 1,
        (Fate.KEPT, "notes of services"): 1,
        (Fate.KEPT, "salts (who shares with whom)"): 2,
        (Fate.KEPT, "states of drafters"): 4,
        (Fate.KEPT, "replies that may be asked for again"): 1,
        (Fate.RECOMPUTED, "index of known pasts"): 4,
        (Fate.DROPPED, "older turns"): 2,  # of tea, and of the deleted one
        (Fate.DROPPED, "marks of deleted sessions"): 1,
    }
    assert plan.nbytes == sum(len(source.get(blob)) for blob in needed(source))
    assert (plan.num_sessions, plan.clashes) == (4, ())


def test_one_session_brings_what_was_kept_of_it_and_nothing_else() -> None:
    source, target = MemoryStore(), MemoryStore()
    filled = fill(source)
    with migration(source, target, only=filled.tea) as moving:
        moved = moving.run()
    assert (moved.num_sessions, moved.num_pins) == (1, 1)
    assert set(refs(target, names.SESSIONS, names.PINS)) == {f"session/{filled.tea}", "pin/first-cup"}
    check_clean(target)


# --- what goes wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize(("letter", "chunk_tokens"), [("r", None), ("R", None), ("R", 64)])
def test_a_destination_that_fails_at_any_call_has_nothing_partial_and_the_next_run_ends_it(
    letter: str, chunk_tokens: int | None
) -> None:
    """Also where what arrives is not what was there, so that only the journal tells that it is the same."""
    source, converted = MemoryStore(), MemoryStore()
    tea, _ = put_session(source, 1, "tea", length=130, layout=ATTENTION)
    put_session(source, 2, length=130, layout=ATTENTION)
    SessionManager(source).pin(tea, "first-cup")
    said = {}
    if chunk_tokens is not None:
        said["conversion"] = Reencoded(Reencoding(chunk_tokens=chunk_tokens))
    with migration(source, converted, **said) as moving:
        moving.run()
    whole = archives(converted)
    call, failed = 0, 0
    while True:
        target = FaultyStore(MemoryStore(), "." * call + letter)
        try:
            with migration(source, target, jobs=1, **said) as moving:
                moving.run()
        except StoreUnavailable:
            failed += 1
            check_clean(target.store)
            assert archives(target.store).items() <= whole.items()
        if target.num_calls <= call:
            break
        with migration(source, target.store, **said) as moving:
            again = moving.run()
        assert again.problems == []
        assert archives(target.store) == whole
        assert set(refs(target.store, names.SESSIONS)) == set(refs(source, names.SESSIONS))
        call += 1
    assert failed > 30


class Narrow(MemoryStore):
    """Is full after so many bytes."""

    left = 0

    def put(self, cls: BlobClass, data: Bytes) -> BlobId:
        self.left -= len(data)
        if self.left < 0:
            raise StoreFull("no space left on the device")
        return super().put(cls, data)


def test_a_full_destination_keeps_what_arrived_and_goes_on_when_there_is_room() -> None:
    source, target = MemoryStore(), Narrow()
    fill(source)
    whole = archives(source)
    arrived = set()
    for nbytes in range(0, 200_000, 20_000):
        target.left = nbytes
        try:
            with migration(source, target) as moving:
                moving.run()
            break
        except StoreFull:
            check_clean(target)
            assert archives(target).items() <= whole.items()
            arrived.add(len(archives(target)))
    assert archives(target) == whole
    assert len(arrived) > 1, "it was full at once or never: the test shows nothing"


def test_a_damaged_session_is_left_out_and_told_of_and_the_rest_arrives() -> None:
    source = Broken()
    filled = fill(source)
    whole = archives(source)
    [lost] = _own_rows(source, filled.plain)[:1]
    source.broken = {lost}
    target = MemoryStore()
    with migration(source, target) as moving:
        moved = moving.run()
    assert [problem.ref for problem in moved.problems] == [f"session/{filled.plain}"]
    assert "not those that were written" in moved.problems[0].message
    assert archives(target) == {ref: each for ref, each in whole.items() if filled.plain not in ref}
    check_clean(target)
    source.broken = set()
    with migration(source, target) as moving:
        assert moving.run().num_sessions == 1
    assert archives(target) == whole


class Picky(Reencoded):
    """Does not do it to sessions of one name."""

    def convert(self, manifest: Manifest, source: Store, target: Store) -> Manifest:
        if manifest.name == "own":
            raise ConfigError("not this one")
        return super().convert(manifest, source, target)


def test_a_session_that_cannot_be_converted_is_left_out_and_the_rest_arrives() -> None:
    source, target = MemoryStore(), MemoryStore()
    filled = fill(source)
    with migration(source, target, conversion=Picky(Reencoding(codec="raw"))) as moving:
        moved = moving.run()
    assert [problem.message for problem in moved.problems] == ["not this one"]
    assert (moved.num_sessions, moved.num_pins) == (3, 1)
    assert f"session/{filled.own}" not in refs(target, names.SESSIONS)
    check_clean(target)


def test_one_that_was_left_out_is_not_said_to_be_there() -> None:
    source, target = MemoryStore(), MemoryStore()
    filled = fill(source)
    for only, arrived in ((filled.own, None), (filled.plain, filled.plain)):
        with migration(source, target, only, conversion=Picky(Reencoding(codec="raw"))) as moving:
            assert moving.run().session == arrived


@pytest.mark.parametrize("which", ["manifest", "rows"])
def test_what_is_gone_from_a_source_that_loses_nothing_is_damage(which: str) -> None:
    source, target = MemoryStore(), MemoryStore()
    filled = fill(source)
    manifest = Catalog(source).session(filled.plain).blob
    source.delete_blob(manifest if which == "manifest" else _own_rows(source, filled.plain)[0], 0)
    with migration(source, target) as moving:
        [refused] = moving.plan().of(Fate.REFUSED)
        moved = moving.run()
    assert (refused.count, len(moved.problems), moved.num_sessions) == (1, 1, 3)
    check_clean(target)


class Expiring(MemoryStore):
    """Loses what is old, as a Redis server does."""

    @property
    def rows_expire(self) -> bool:
        return True

    def since(self) -> float | None:
        return 0.0


def test_rows_that_expired_in_the_source_are_dropped_and_ids_and_text_arrive() -> None:
    source, target = Expiring(), MemoryStore()
    filled = fill(source)
    rows = _own_rows(source, filled.plain)
    source.delete_blob(rows[0], 0)
    manifest = Catalog(source).session(filled.plain).manifest
    with migration(source, target) as moving:
        moved = moving.run()
    assert (moved.lost_blobs, moved.problems) == (1, [])
    arrived = Catalog(target).session(filled.plain).manifest
    assert (arrived.tokens, arrived.messages) == (manifest.tokens, manifest.messages)
    assert rows[0] not in {ref.blob for ref in arrived.blobs()}
    check_clean(target)
    with migration(source, target) as moving:
        assert moving.run().before == 5


def test_a_session_that_the_source_lost_is_stated_and_no_problem() -> None:
    source, target = Expiring(), MemoryStore()
    filled = fill(source)
    source.delete_blob(Catalog(source).session(filled.plain).blob, 0)
    with migration(source, target) as moving:
        assert [item.count for item in moving.plan().items if "lost them" in item.why] == [1]
        moved = moving.run()
    assert (moved.expired, moved.problems, moved.num_sessions) == (1, [], 3)


def test_a_quota_is_asked_before_anything_is_written() -> None:
    source, target = MemoryStore(), MemoryStore()
    fill(source)
    whole = archives(source)
    with pytest.raises(QuotaExceeded), migration(source, target, policy=Policy(quota=5_000)) as moving:
        moving.run()
    assert not blobs(target)
    with migration(source, target, policy=Policy(quota=10_000_000)) as moving:
        moving.run()
    assert archives(target) == whole


def test_a_budget_below_the_rows_is_planned_for() -> None:
    source, target = MemoryStore(), MemoryStore()
    fill(source)
    with migration(source, target, policy=Policy(budget=1000)) as moving:
        assert any("1,000 bytes" in item.why for item in moving.plan().of(Fate.DROPPED))


# --- a source, or a destination, that is used meanwhile --------------------------------------------


class Living(MemoryStore):
    """Somebody goes on talking whenever rows are read, so many times."""

    def __init__(self) -> None:
        super().__init__()
        self.session = ""
        self.turns = 0
        self.number = 0

    def get(self, blob: BlobId, buffers: Buffers = NEW) -> bytes:
        data = super().get(blob, buffers)
        if self.turns and blob.startswith(BlobClass.ROWS):
            self.turns -= 1
            self.number += 1
            turn(self, self.session, seed=50 + self.number, length=320 + self.number)
        return data


def test_what_went_on_while_it_was_moved_is_moved_again() -> None:
    source, target = Living(), MemoryStore()
    filled = fill(source)
    source.session, source.turns = filled.plain, 1
    with migration(source, target, jobs=1) as moving:
        moved = moving.run()
    assert (moved.num_sessions, moved.again, moved.problems) == (4, 1, [])
    assert archives(target) == archives(source)


class Collected(Living):
    """What the last turn had is gone as soon as somebody goes on."""

    def get(self, blob: BlobId, buffers: Buffers = NEW) -> bytes:
        before = self.number
        data = super().get(blob, buffers)
        if self.number > before:
            raise BlobMissing("gc was faster")
        return data


def test_what_is_gone_because_the_session_went_on_is_no_damage() -> None:
    source, target = Collected(), MemoryStore()
    filled = fill(source)
    source.session, source.turns = filled.own, 1
    with migration(source, target, jobs=1, only=filled.own) as moving:
        moved = moving.run()
    assert (moved.again, moved.problems) == (1, [])
    assert Catalog(target).session(filled.own).manifest.generation == 2


def test_what_goes_on_without_end_is_told_of() -> None:
    source, target = Living(), MemoryStore()
    filled = fill(source)
    source.session, source.turns = filled.plain, 10_000
    with migration(source, target, jobs=1) as moving:
        moved = moving.run()
    assert [problem.ref for problem in moved.problems] == [f"session/{filled.plain}"]
    assert "went on" in moved.problems[0].message
    check_clean(target)
    source.turns = 0
    with migration(source, target) as moving:
        moving.run()
    assert archives(target) == archives(source)


def test_sessions_that_are_written_to_are_told_of() -> None:
    source, target = MemoryStore(), MemoryStore()
    filled = fill(source)
    with acquire(source, filled.plain), migration(source, target) as moving:
        assert moving.run().writing == (filled.plain,)


def test_a_source_that_went_on_is_followed() -> None:
    source, target = MemoryStore(), MemoryStore()
    filled = fill(source)
    with migration(source, target) as moving:
        moving.run()
    turn(source, filled.plain, seed=70)
    SessionManager(source).rename(filled.tea, "coffee")
    with migration(source, target) as moving:
        moved = moving.run()
    assert (moved.num_sessions, moved.before, moved.problems) == (2, 3, [])
    assert archives(target) == archives(source)
    assert Catalog(target).find("coffee") == filled.tea
    assert Catalog(target).named("tea") is None


def test_a_destination_that_went_on_is_left_as_it_is() -> None:
    source, target = MemoryStore(), MemoryStore()
    filled = fill(source)
    with migration(source, target) as moving:
        moving.run()
    newer = turn(target, filled.plain, seed=71)
    with migration(source, target) as moving:
        moved = moving.run()
    assert (moved.ahead, moved.before, moved.num_sessions) == (1, 4, 0)
    assert Catalog(target).session(filled.plain).blob == newer


@pytest.mark.parametrize("name", [None, "own"])
def test_where_both_went_on_neither_is_lost(name: str | None) -> None:
    source, target = MemoryStore(), MemoryStore()
    filled = fill(source)
    session = filled.plain if name is None else filled.own
    with migration(source, target) as moving:
        moving.run()
    theirs, ours = turn(target, session, seed=71), turn(source, session, seed=72)
    with pytest.raises(SessionExists), migration(source, target) as moving:
        moving.run()
    with migration(source, target, clash=Clash.RENAME) as moving:
        assert moving.run().num_sessions == 1
    assert Catalog(target).session(session).blob == theirs
    wanted = Catalog(source).session(session)
    assert wanted.blob == ours
    [copy] = [each for each in Catalog(target).entries() if each.manifest.chunks == wanted.manifest.chunks]
    assert copy.manifest.session != session
    assert copy.manifest.name == (None if name is None else "own-2")
    if name is not None:
        assert Catalog(target).find(name) == session
        assert Catalog(target).find("own-2") == copy.manifest.session
    check_clean(target)


def test_what_was_deleted_in_the_destination_does_not_come_back() -> None:
    source, target = MemoryStore(), MemoryStore()
    filled = fill(source)
    with migration(source, target) as moving:
        moving.run()
    SessionManager(target, None, Policy(lease=5, grace=10)).delete(filled.plain)
    with migration(source, target) as moving:
        moved = moving.run()
    assert (moved.gone, moved.num_sessions) == (1, 0)
    assert f"session/{filled.plain}" not in refs(target, names.SESSIONS)


def test_what_is_deleted_in_the_source_stays_in_the_destination_and_is_told_of() -> None:
    source, target = MemoryStore(), MemoryStore()
    filled = fill(source)
    with migration(source, target) as moving:
        moving.run()
    SessionManager(source, None, Policy(lease=5, grace=10)).delete(filled.plain)
    with migration(source, target) as moving:
        assert [item.count for item in moving.plan().items if "not in the source any more" in item.why] == [1]
        moving.run()
    assert f"session/{filled.plain}" in refs(target, names.SESSIONS)


def test_the_journal_is_not_believed_over_the_store() -> None:
    source, target = MemoryStore(), MemoryStore()
    filled = fill(source)
    with migration(source, target) as moving:
        moving.run()
    lost = _own_rows(source, filled.plain)[0], Catalog(target).session(filled.own).blob
    for blob in lost:
        target.delete_blob(blob, 0)
    with migration(source, target) as moving:
        moved = moving.run()
    assert (moved.num_sessions, moved.before) == (2, 3)
    assert archives(target) == archives(source)


def test_a_session_that_is_written_to_in_the_destination_is_left_alone() -> None:
    source, target = MemoryStore(), MemoryStore()
    filled = fill(source)
    with migration(source, target) as moving:
        moving.run()
    turn(source, filled.plain, seed=70)
    with acquire(target, filled.plain, holder="a chat"), migration(source, target) as moving:
        [problem] = moving.run().problems
    assert "a chat" in problem.message


def test_without_a_journal_what_is_the_same_is_known_by_itself_and_what_is_older_by_its_turns() -> None:
    source, target = MemoryStore(), MemoryStore()
    filled = fill(source)
    with migration(source, target) as moving:
        moving.run()
    for ref, value in refs(target, JOURNAL).items():
        target.swap(ref, value, None)
    turn(source, filled.plain, seed=70)
    with migration(source, target) as moving:
        moved = moving.run()
    assert (moved.before, moved.num_sessions) == (4, 1)
    assert archives(target) == archives(source)


class Contested(MemoryStore):
    """Where something happens just before a session is committed."""

    act: Callable[[str, bytes | None], object] | None = None

    def swap(
        self, name: str, old: bytes | None, new: bytes | None, guard: tuple[str, bytes] | None = None
    ) -> bool:
        if self.act is not None and name.startswith(names.SESSIONS):
            act, self.act = self.act, None
            act(name, new)
        return super().swap(name, old, new, guard)


def test_a_name_that_is_taken_at_the_last_moment_is_not_taken_twice() -> None:
    source, target = MemoryStore(), Contested()
    put_session(source, 1, "tea")
    target.act = lambda name, new: put_session(target, 2, "tea")
    with migration(source, target) as moving:
        [problem] = moving.run().problems
    assert "changed in the destination" in problem.message
    assert len(refs(target, names.SESSIONS)) == 1
    check_clean(target)


def test_two_migrations_of_the_same_do_not_stand_in_each_others_way() -> None:
    source, target = MemoryStore(), Contested()
    fill(source)
    target.act = lambda name, new: target.hint({name: new or b""})  # the other one was faster
    with migration(source, target) as moving:
        assert moving.run().problems == []
    assert archives(target) == archives(source)


# --- clashes ---------------------------------------------------------------------------------------


def clashing() -> tuple[MemoryStore, MemoryStore]:
    """A name, a kept turn and an id that are something else's in the destination."""
    source, target = MemoryStore(), MemoryStore()
    filled = fill(source)
    other, _ = put_session(target, 9, "tea")
    SessionManager(target).pin(other, "first-cup")
    put_session(target, 8, session=filled.plain)
    return source, target


def test_clashes_are_refused_before_anything_is_written() -> None:
    source, target = clashing()
    there = blobs(target), refs(target, "")
    with migration(source, target) as moving:
        assert len(moving.plan().clashes) == 3
        with pytest.raises(SessionExists) as refused:
            moving.run()
    assert len(refused.value.details["clashes"]) == 3  # type: ignore[arg-type]
    assert (blobs(target), refs(target, "")) == there


def test_skipped_they_are_left_out() -> None:
    source, target = clashing()
    there = archives(target)
    with migration(source, target, clash=Clash.SKIP) as moving:
        moved = moving.run()
    assert (moved.skipped, moved.num_sessions, moved.num_pins, moved.problems) == (3, 2, 0, [])
    assert there.items() <= archives(target).items()
    check_clean(target)


def test_renamed_they_find_another_place_and_are_known_there_the_next_time() -> None:
    source, target = clashing()
    there = archives(target)
    filled = {entry.manifest.name: entry.manifest for entry in Catalog(source).entries()}
    for _ in range(2):
        with migration(source, target, clash=Clash.RENAME) as moving:
            moved = moving.run()
        assert there.items() <= archives(target).items()
        check_clean(target)
    assert (moved.num_sessions, moved.before) == (0, 5)
    catalog = Catalog(target)
    assert len(refs(target, names.SESSIONS)) == 2 + 4
    assert catalog.session(catalog.find("tea-2")).manifest.tokens == filled["tea"].tokens
    assert catalog.pin("first-cup-2").manifest.session == catalog.find("tea-2")


def test_what_was_renamed_stays_so_when_its_source_goes_on() -> None:
    source, target = clashing()
    with migration(source, target, clash=Clash.RENAME) as moving:
        moving.run()
    tea = Catalog(source).find("tea")
    turn(source, tea, seed=90)
    with migration(source, target) as moving:  # nothing is in its place any more
        assert moving.run().num_sessions == 1
    arrived = Catalog(target).session(Catalog(target).find("tea-2")).manifest
    assert arrived.chunks == Catalog(source).session(tea).manifest.chunks
    assert set(refs(target, names.NAMES)) == {"name/tea", "name/tea-2", "name/tea-again", "name/own"}


def test_one_that_shares_with_no_other_shares_with_no_other_under_another_id_either() -> None:
    source, target = MemoryStore(), MemoryStore()
    own = fill(source).own
    put_session(target, 9, session=own)
    with migration(source, target, only=own, clash=Clash.RENAME) as moving:
        there = moving.run().session
    assert there is not None
    assert there != own
    assert Catalog(target).session(there).manifest.salt == salts.own(there)


def test_another_source_may_not_take_the_place_of_what_one_moved() -> None:
    """Two copies of a store went on apart: only turns that are known to follow replace what is there."""
    source, target = MemoryStore(), MemoryStore()
    filled = fill(source)
    with migration(source, target) as moving:
        moving.run()
    turn(source, filled.plain, seed=70)
    turn(source, filled.plain, seed=71)
    for info in list(source.list_blobs()):
        if info.blob not in needed(source):
            source.delete_blob(info.blob, 0)
    with pytest.raises(SessionExists), migration(source, target, tag=b"another") as moving:
        moving.run()
    with migration(source, target, tag=TAG) as moving:
        assert moving.run().num_sessions == 1


class Broken(MemoryStore):
    """Gives other bytes back than were put."""

    def __init__(self) -> None:
        super().__init__()
        self.broken: set[BlobId] = set()

    def get(self, blob: BlobId, buffers: Buffers = NEW) -> bytes:
        data = super().get(blob, buffers)
        if blob in self.broken:
            verify_blob(blob, flip(data, 100))
        return data


def _own_rows(store: Store, session: str) -> list[BlobId]:
    """Blobs of rows that no other session has."""
    own = [ref.blob for ref in Catalog(store).session(session).manifest.blobs()]
    others: Mapping[BlobId, int] = {
        blob: 1
        for entry in Catalog(store).entries()
        if entry.manifest.session != session
        for blob in entry.blobs()
    }
    return [blob for blob in own if blob not in others and blob.startswith(BlobClass.ROWS)]
