"""gc takes what no ref needs and what has outlived its time, says so before, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from engine.errors import BlobMissing, SessionNotFound
from engine.runner import Engine
from serialization.blobs import BlobId, Store
from serialization.refs import StoredLogits
from sessions.manager import SessionManager
from sessions.names import SESSIONS, session_ref
from sessions.policy import Policy
from sessions.stores.memory import MemoryStore
from tests.sessions.clock import Clock

GRACE, LEASE = 100.0, 10.0


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    return MemoryStore(clock=clock)


@pytest.fixture
def manager(store: Store, engine: Engine) -> SessionManager:
    return SessionManager(store, engine, Policy(lease=LEASE, grace=GRACE))


def save(manager: SessionManager, text: str, name: str | None = None) -> str:
    engine = manager.engine
    seq = engine.create()
    engine.feed(seq, engine.tokenizer.encode(text))
    session = manager.create(name)
    manager.save(session, seq, ())
    session.close()
    engine.close(seq)
    return session.id


def blobs(store: Store) -> set[BlobId]:
    return {info.blob for info in store.list_blobs()}


def sweep(manager: SessionManager) -> int:
    return manager.collect(manager.plan_gc()).num_blobs


def test_what_a_session_needs_is_never_taken(manager: SessionManager, store: Store, clock: Clock) -> None:
    session = save(manager, "kept " * 100)
    manager.pin(session, "pinned")
    before = blobs(store)
    clock.now += 100 * GRACE
    assert list(manager.plan_gc().blobs) == []
    assert sweep(manager) == 0
    assert blobs(store) == before


def test_orphans_stay_for_their_grace(manager: SessionManager, store: Store, clock: Clock) -> None:
    manager.delete(save(manager, "gone " * 100))
    assert sweep(manager) == 0
    clock.now += GRACE - 1
    assert sweep(manager) == 0
    clock.now += 2
    plan = manager.plan_gc()
    assert plan.nbytes == sum(info.nbytes for info in store.list_blobs())
    assert sweep(manager) == len(plan.blobs)
    assert blobs(store) == set()


def test_a_plan_changes_nothing(manager: SessionManager, store: Store, clock: Clock) -> None:
    manager.delete(save(manager, "gone"))
    clock.now += 2 * GRACE
    before = blobs(store)
    assert manager.plan_gc().blobs
    assert blobs(store) == before


def test_a_blob_that_is_needed_again_since_the_plan_stays(
    manager: SessionManager, store: Store, clock: Clock
) -> None:
    manager.delete(save(manager, "again " * 100))
    clock.now += 2 * GRACE
    plan = manager.plan_gc()
    session = save(manager, "again " * 100)  # the same rows, put once more
    manager.collect(plan)
    for ref in manager.manifest(session).blobs():
        store.get(ref.blob)


def test_a_referenced_blob_stays_even_if_a_plan_names_it(
    manager: SessionManager, store: Store, clock: Clock
) -> None:
    """The plan is old, and the age of what it names has come: refs are read again before anything goes."""
    session = save(manager, "needed " * 100)
    clock.now += 2 * GRACE
    plan = replace(manager.plan_gc(), blobs=tuple(store.list_blobs()))
    assert manager.collect(plan).num_blobs == 0
    for ref in manager.manifest(session).blobs():
        store.get(ref.blob)


def test_a_young_blob_stays_even_if_a_plan_names_it(manager: SessionManager, store: Store) -> None:
    manager.delete(save(manager, "young"))
    plan = replace(manager.plan_gc(), blobs=tuple(store.list_blobs()))
    assert manager.collect(plan).num_blobs == 0


def test_superseded_chunks_go_and_the_session_resumes(
    manager: SessionManager, store: Store, clock: Clock
) -> None:
    engine = manager.engine
    seq = engine.create()
    session = manager.create()
    for turn in range(4):
        engine.feed(seq, engine.tokenizer.encode(f"turn {turn} " * 9))
        manager.save(session, seq, ())
        clock.now += 2 * GRACE
        session.lease.lease.renew()
    assert sweep(manager) > 0
    session.close()
    opened = manager.open(session.id)
    assert manager.resume(opened)[1].recomputed == 0
    opened.close()


def test_sessions_expire_unless_pinned_or_in_use(manager: SessionManager, clock: Clock) -> None:
    manager.policy = Policy(lease=LEASE, grace=GRACE, session_ttl=1000.0)
    old, pinned, used = (save(manager, text) for text in ("old", "pinned", "used"))
    manager.pin(pinned, "pin")
    clock.now += 1001
    young = save(manager, "young")
    holder = manager.open(used)
    plan = manager.plan_gc()
    assert set(plan.expired) == {old, used}
    result = manager.collect(plan)
    holder.close()
    assert (result.expired, result.skipped) == ((old,), (used,))
    assert {info.id for info in manager.list()} == {pinned, used, young}
    with pytest.raises(SessionNotFound):
        manager.info(old)


def test_rows_expire_before_the_conversation(manager: SessionManager, store: Store, clock: Clock) -> None:
    manager.policy = Policy(lease=LEASE, grace=GRACE, rows_ttl=500.0)
    session = save(manager, "some words " * 40)
    rows = {ref.blob for ref in manager.manifest(session).blobs()}
    clock.now += 501
    assert manager.collect(manager.plan_gc()).released == (session,)
    clock.now += 2 * GRACE
    sweep(manager)
    assert not rows & blobs(store) - {ref.blob for ref in manager.manifest(session).blobs()}
    assert manager.manifest(session).length == 440
    assert tuple(manager.plan_gc().released) == ()


def test_the_budget_is_met_by_those_least_recently_saved(manager: SessionManager, clock: Clock) -> None:
    sessions = []
    for text in ("first ", "second ", "third "):
        sessions.append(save(manager, text * 90))
        clock.now += 10
    sizes = [manager.info(session).own_bytes for session in sessions]
    manager.policy = Policy(lease=LEASE, grace=GRACE, budget=sum(sizes) - sizes[0] // 2)
    assert tuple(manager.plan_gc().released) == (sessions[0],)
    manager.policy = Policy(lease=LEASE, grace=GRACE, budget=sizes[2])
    assert tuple(manager.plan_gc().released) == (sessions[0], sessions[1])
    manager.pin(sessions[0], "mine")
    assert sessions[0] not in manager.plan_gc().released


def test_hints_and_names_of_deleted_sessions_are_dropped(manager: SessionManager, store: Store) -> None:
    save(manager, "x" * 600, "keep")
    manager.delete(save(manager, "y" * 600, "drop"))
    sweep(manager)
    live = manager.info("keep").id
    assert {value.decode() for _, value in store.list_refs("prefix/")} == {live}


def test_nothing_is_collected_on_a_guess(manager: SessionManager, store: MemoryStore, clock: Clock) -> None:
    """While one manifest cannot be read, nobody knows what it needs."""
    session = save(manager, "readable " * 50)
    manager.delete(save(manager, "orphan"))
    clock.now += 2 * GRACE
    value = store.read(session_ref(session))
    assert value is not None
    assert store.delete_blob(BlobId(value.decode()), 0)
    with pytest.raises(BlobMissing):
        manager.plan_gc()


def test_a_plan_tells_what_the_next_gc_frees_of_sessions_that_go(
    manager: SessionManager, store: Store, clock: Clock
) -> None:
    for text, name in (("one " * 100, "old"), ("one " * 100 + "more " * 80, "longer"), ("two " * 90, "rows")):
        save(manager, text, name)
    clock.now += 10 * GRACE
    save(manager, "one " * 100, "young")  # has the same rows as the old one
    plain = manager.plan_gc()
    assert plain.later_nbytes == 0
    manager.policy = replace(manager.policy, session_ttl=5 * GRACE)
    plan, before = manager.plan_gc(), {info.blob: info.nbytes for info in store.list_blobs()}
    assert len(plan.expired) == 3
    assert manager.collect(plan).nbytes == 0
    clock.now += GRACE
    manager.collect(manager.plan_gc())
    gone = set(before) - blobs(store)
    assert plan.later_nbytes == sum(before[blob] for blob in gone) > 0
    manager.policy = replace(manager.policy, session_ttl=None, rows_ttl=0.0)
    clock.now += GRACE
    plan, before = manager.plan_gc(), {info.blob: info.nbytes for info in store.list_blobs()}
    assert len(plan.released) == 1
    now_too = {info.blob for info in plan.blobs}
    manager.collect(plan)
    clock.now += 2 * GRACE
    manager.collect(manager.plan_gc())
    edge = manager.manifest("young").edge
    assert isinstance(edge, StoredLogits)
    freed = sum(before[blob] for blob in set(before) - blobs(store) - now_too)
    assert plan.later_nbytes == freed + edge.ref.nbytes
    assert freed > 0


class Between(MemoryStore):
    """Acts once when all sessions were listed."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock=clock)
        self.then: Callable[[], object] | None = None

    def list_refs(self, prefix: str) -> Iterator[tuple[str, bytes]]:
        yield from super().list_refs(prefix)
        then, self.then = self.then if prefix == SESSIONS else None, None if prefix == SESSIONS else self.then
        if then is not None:
            then()


def test_what_goes_from_a_pin_to_a_session_while_gc_looks_stays(clock: Clock, engine: Engine) -> None:
    """The plan saw neither of them, so that the second look alone keeps it."""
    store = Between(clock)
    manager = SessionManager(store, engine, Policy(lease=LEASE, grace=GRACE))
    session = save(manager, "words " * 100)
    manager.pin(session, "kept")
    manager.delete(session)
    clock.now += 2 * GRACE
    made: list[str] = []

    def load() -> None:
        made.append(manager.load("kept").id)
        manager.unpin("kept")

    store.then = load
    plan = manager.plan_gc()
    assert len(plan.blobs) > 1
    manager.collect(plan)
    assert manager.check().clean
    assert manager.manifest(made[0]).length
