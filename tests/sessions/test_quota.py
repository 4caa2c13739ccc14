"""A quota counts every byte, is asked before anything is written, and refuses nothing that gives room."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.errors import QuotaExceeded
from engine.runner import Engine
from engine.state import PartKind, parts_of
from serialization.blobs import Store
from serialization.manifest import manifest_id
from serialization.refs import BlobRef
from sessions.manager import SessionManager
from sessions.policy import Policy
from sessions.quota import Quota, about_nbytes
from sessions.stores.base import StoreConfig
from sessions.stores.disk import DiskStore
from sessions.stores.memory import MemoryStore
from sessions.stores.redis import RedisStore
from sessions.stores.sealed import roomier
from sessions.stores.sealing import sealed_store
from sessions.stores.tiered import CacheTier, TieredStore
from tests.exact.members import open_member
from tests.redis_server import RedisServer
from tests.sessions.clock import Clock
from tests.sessions.sealing import ring

GRACE = 100.0


def policy(**more: Any) -> Policy:
    return Policy(lease=10.0, grace=GRACE, codec="raw", **more)


def save(manager: SessionManager, text: str, name: str | None = None) -> str:
    """One session more. After an error nothing of it is held."""
    engine = manager.engine
    seq = engine.create()
    try:
        engine.feed(seq, engine.tokenizer.encode(text))
        with closing(manager.create(name)) as session:
            manager.save(session, seq, ())
        return session.id
    finally:
        engine.close(seq)


def files(root: Path) -> dict[str, int]:
    return {str(path): path.stat().st_size for path in root.rglob("*") if path.is_file()}


@pytest.fixture(params=["memory", "disk", "tiered", "sealed", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made: Store
    match request.param:
        case "memory":
            made = MemoryStore()
        case "disk":
            made = DiskStore(tmp_path / "store")
        case "tiered":
            made = TieredStore([CacheTier(MemoryStore(), 1 << 20)], DiskStore(tmp_path / "store"))
        case "sealed":
            inner = DiskStore(tmp_path / "store", config=roomier(StoreConfig()))
            made = sealed_store(inner, ring(tmp_path / "keys"), "default", StoreConfig())
        case _:
            server: RedisServer = request.getfixturevalue("redis_server")
            with closing(server.client()) as client:
                client.flushall()
            made = RedisStore(server.url)
    with closing(made):
        yield made


@pytest.mark.redis
def test_no_more_is_stored_than_may_be_and_nothing_by_halves(store: Store, engine: Engine) -> None:
    most = store.usage() + 5_000_000
    manager = SessionManager(store, engine, policy(quota=most))
    refused = None
    for number in range(100):
        try:
            before = store.usage(), {info.blob for info in store.list_blobs()}
            save(manager, f"{number} and so on " * 60)
        except QuotaExceeded as error:
            refused = error
            break
    assert refused is not None, "a hundred sessions fit, so that nothing was shown"
    assert number > 1
    assert (refused.exit_code, refused.details["quota"]) == (44, most)
    used = refused.details["used"]
    assert isinstance(used, int)
    assert most * 0.5 < used <= most
    assert {info.blob for info in store.list_blobs()} == before[1]
    assert store.usage() <= most
    assert len(manager.list()) == number
    assert manager.check().clean
    assert manager.check().orphans == 0


def test_what_gives_room_back_is_never_refused(engine: Engine) -> None:
    clock = Clock()
    store = MemoryStore(clock=clock)
    manager = SessionManager(store, engine, policy())
    one, two, three = (save(manager, f"{word} " * 300, word) for word in ("one", "two", "three"))
    full = SessionManager(store, engine, policy(quota=1))
    for grows in (
        lambda: save(full, "more"),
        lambda: full.fork(one),
        lambda: full.pin(one, "kept"),
        lambda: full.import_(archive(manager, one)),
    ):
        with pytest.raises(QuotaExceeded):
            grows()
    full.rename(one, "first")
    full.release_rows(one)
    full.delete(two)
    clock.now += 2 * GRACE
    assert full.collect(full.plan_gc()).num_blobs > 0
    assert {info.id for info in full.list()} == {one, three}
    assert full.check().clean


def archive(manager: SessionManager, session: str) -> io.BytesIO:
    out = io.BytesIO()
    manager.export(session, out)
    return io.BytesIO(out.getvalue())


def test_an_archive_is_refused_before_its_first_blob(manager: SessionManager, engine: Engine) -> None:
    exported = archive(manager, save(manager, "to and fro " * 100))
    other = MemoryStore()
    with pytest.raises(QuotaExceeded):
        SessionManager(other, engine, policy(quota=len(exported.getvalue()) // 2)).import_(exported)
    assert list(other.list_blobs()) == list(other.list_refs("session/")) == []


def test_what_was_deleted_by_others_is_room_again(engine: Engine) -> None:
    store = MemoryStore()
    others = SessionManager(store, engine, policy())
    session = save(others, "theirs " * 200)
    manager = SessionManager(store, engine, policy(quota=store.usage() + 100_000))
    with pytest.raises(QuotaExceeded):
        save(manager, "x y z " * 300)
    others.delete(session)
    for info in list(store.list_blobs()):
        store.delete_blob(info.blob, 0)
    save(manager, "a few words")  # far from what is there now: the store is asked before it is refused
    assert len(manager.list()) == 1


def test_with_a_budget_rows_of_those_least_recently_used_give_way_first(engine: Engine) -> None:
    clock = Clock()
    store = MemoryStore(clock=clock)
    roomy = SessionManager(store, engine, policy())
    sessions = []
    for word in ("old", "older", "young"):
        sessions.append(save(roomy, f"{word} words " * 100))
        clock.now += 2 * GRACE
    most = store.usage() + 100_000
    with pytest.raises(QuotaExceeded):
        save(SessionManager(store, engine, policy(quota=most)), "new words " * 100)
    manager = SessionManager(store, engine, policy(quota=most, budget=most))
    new = save(manager, "new words " * 100)
    has_rows = [any(chunk.blobs for chunk in manager.manifest(session).chunks) for session in sessions]
    assert has_rows == [False, *has_rows[1:2], True], "not those used last"
    assert all(len(manager.manifest(session).tokens) > 50 for session in sessions)
    assert store.usage() <= most
    opened = manager.open(new)
    assert manager.resume(opened)[1].recomputed == 0
    opened.close()
    assert manager.check().clean


def test_where_nothing_can_be_freed_on_a_guess_the_quota_is_what_is_told(engine: Engine) -> None:
    """Another session's damage is no reason to give up a turn that was said: see `Held.save_and_keep`."""
    store = MemoryStore()
    roomy = SessionManager(store, engine, policy())
    damaged = roomy.manifest(save(roomy, "old words " * 100))
    assert store.delete_blob(manifest_id(damaged.encode()), 0.0)
    most = store.usage() + 1000
    with pytest.raises(QuotaExceeded):
        save(SessionManager(store, engine, policy(quota=most, budget=most)), "new words " * 100)


def test_a_pinned_session_gives_nothing_up_for_others(engine: Engine) -> None:
    clock = Clock()
    store = MemoryStore(clock=clock)
    roomy = SessionManager(store, engine, policy())
    session = save(roomy, "kept words " * 100)
    roomy.pin(session, "kept")
    clock.now += 2 * GRACE
    most = store.usage() + 1000
    with pytest.raises(QuotaExceeded):
        save(SessionManager(store, engine, policy(quota=most, budget=most)), "new words " * 100)
    assert any(chunk.blobs for chunk in roomy.manifest(session).chunks)


# --- how it counts ---------------------------------------------------------------------------


class Counted(MemoryStore):
    """Tells what it is told to, and how often it was asked."""

    there = 0
    num_asked = 0

    def usage(self) -> int:
        self.num_asked += 1
        return self.there


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def granted(quota: Quota, nbytes: int) -> bool:
    try:
        with quota.room(nbytes):
            return True
    except QuotaExceeded:
        return False


def test_far_from_the_quota_the_store_is_seldom_asked() -> None:
    store, clock = Counted(), Time()
    quota = Quota(store, 1000, clock)
    assert all(granted(quota, 1) for _ in range(500))
    assert store.num_asked == 1
    clock.now = 61
    assert granted(quota, 1)
    assert store.num_asked == 2


def test_nothing_is_refused_for_what_was_granted_and_not_written() -> None:
    store = Counted()
    quota = Quota(store, 1000, Time())
    assert [granted(quota, 400) for _ in range(5)] == [True] * 5, "what is there is nothing still"


def test_what_is_being_written_counts_until_it_is_there() -> None:
    quota = Quota(Counted(), 1000, Time())
    with quota.room(600):
        assert not granted(quota, 600)
        assert granted(quota, 400)
    assert granted(quota, 600)


def test_what_others_write_is_seen_at_once_near_the_quota() -> None:
    store, clock = Counted(), Time()
    quota = Quota(store, 1000, clock)
    store.there = 950
    assert granted(quota, 10)
    store.there = 995
    clock.now = 1.5
    assert not granted(quota, 10)


def test_what_others_deleted_is_seen_before_more_is_refused() -> None:
    store, clock = Counted(), Time()
    quota = Quota(store, 1000, clock)
    store.there = 800  # far from the quota, and too near for this
    assert not granted(quota, 300)
    store.there, clock.now = 100, 2.0
    assert granted(quota, 300)


def test_who_is_over_the_quota_does_not_have_the_store_counted_at_every_call() -> None:
    store, clock = Counted(), Time()
    store.there = 2000
    quota = Quota(store, 1000, clock)
    assert not any(granted(quota, 10) for _ in range(100))
    assert store.num_asked == 1


def test_without_a_quota_nothing_is_counted() -> None:
    store = Counted()
    assert granted(Quota(store, None), 1 << 60)
    assert store.num_asked == 0


# --- how much something takes ------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3", "mamba2", "qwen3_next", "deepseek_v4"])
def test_a_turn_takes_no_more_than_is_asked_for_it(family: str) -> None:
    """Also of windows, blocks and point state, and of a turn that goes on from a stored one."""
    engine = open_member(family, "f32", n_ctx=2048, num_cells=4096, num_seqs=2)
    store = MemoryStore()
    asked: list[int] = []

    class Asking(Quota):
        @contextmanager
        def room(self, nbytes: int) -> Iterator[None]:
            asked.append(nbytes)
            yield

    manager = SessionManager(store, engine, policy(), quota=Asking(store, None))
    seq = engine.create()
    with closing(manager.create()) as session:
        stored_before: set[BlobRef] = set()
        synced = 0
        for length in (40, 300, 5, 60, 120, 700):
            before = store.usage()
            engine.feed(seq, [number % 200 for number in range(length)])
            asked.clear()
            manager.save(session, seq, ())
            assert store.usage() - before <= sum(asked)
            rows = {blob.ref for chunk in manager.manifest(session.id).chunks for blob in chunk.blobs}
            new = sum(ref.raw_nbytes for ref in rows - stored_before)
            if not parts_of(engine.layout, PartKind.WINDOW):  # what is kept of windows is guessed
                assert new <= about_nbytes(engine.layout, 256, synced, engine.length(seq))
            stored_before, synced = rows, engine.length(seq)
            about = about_nbytes(engine.layout, 256, 0, engine.length(seq))
            assert about <= sum(spec.row_nbytes for spec in engine.layout) * engine.length(seq)
    engine.close(seq)
