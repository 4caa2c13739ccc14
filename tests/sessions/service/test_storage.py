"""What is stored is told by tier and by age, to whom it concerns, and counted no more often than it must."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.errors import QuotaExceeded, StoreUnavailable
from engine.runner import Engine
from serialization.blobs import BlobClass
from sessions.listing import ages
from sessions.manager import SessionManager
from sessions.policy import Policy
from sessions.service.ask import Keep
from sessions.service.backend import Backend, BackendConfig
from sessions.service.logs import tenant_hash
from sessions.service.storage import Storage
from sessions.stores.disk import DiskStore
from sessions.stores.memory import MemoryStore
from sessions.stores.open import open_store
from tests.sessions.clock import Clock
from tests.sessions.conftest import MakeEngine
from tests.sessions.service.hearing import SHORT, T, heard, user, wait_for
from tests.sessions.service.serving import served


def test_bytes_are_told_by_tier_and_by_tenant(make_engine: MakeEngine, tmp_path: Path) -> None:
    def opened(tenant: str) -> object:
        return open_store(f"tiered:memory=1M,{tmp_path / 'store'}", tenant)

    backend = Backend(make_engine(), opened, BackendConfig())  # type: ignore[arg-type]
    with closing(backend), served(backend) as at:
        for tenant in (T, "ann"):
            session = backend.create(tenant).id
            heard(backend.turn(tenant, session, user("hello"), SHORT))
        wait_for(lambda: "tenuto_stored_age_seconds" in at.client.get("/metrics").text)
        told = {
            (sample.labels["tenant"], sample.labels["tier"]): sample.value
            for family in text_string_to_metric_families(at.client.get("/metrics").text)
            for sample in family.samples
            if sample.name == "tenuto_stored_bytes"
        }
        assert set(told) == {(tenant_hash(t), tier) for t in (T, "ann") for tier in ("memory", "disk")}
        assert all(nbytes > 0 for nbytes in told.values())
        storage = at.client.get("/v1/storage").json()
        memory, disk = storage["tiers"]
        assert (memory["kind"], memory["budget_bytes"]) == ("memory", 1 << 20)
        assert (disk["kind"], disk["budget_bytes"]) == ("disk", None)
        assert disk["nbytes"] == storage["total_bytes"]
        assert sum(age["num_blobs"] for age in storage["ages"]) > 1
        assert storage["ages"][0]["nbytes"] > 0
        assert storage["ages"][-1]["below_seconds"] is None


def test_ages_are_of_the_last_put() -> None:
    clock = Clock()
    store = MemoryStore(clock=clock)
    store.put(BlobClass.ROWS, bytes(100))
    clock.now += 2 * 86400
    store.put(BlobClass.ROWS, bytes(30))
    assert [(age.num_blobs, age.nbytes) for age in ages(store)] == [(1, 30), (0, 0), (1, 100), (0, 0), (0, 0)]


def test_figures_are_asked_for_once_in_a_while() -> None:
    clock, store = Clock(), MemoryStore()
    asked: list[str] = []

    @contextmanager
    def managed(tenant: str) -> Iterator[SessionManager]:
        asked.append(tenant)
        if tenant == "down":
            raise StoreUnavailable("down")
        clock.now += 10  # it takes long
        yield SessionManager(store)

    storage = Storage(managed, lambda: ["ann", "down", "ann"], clock)
    assert storage.figures().age is None, "nobody waits for the first figures"
    wait_for(lambda: storage.figures().age is not None)
    assert set(storage.figures().tiers) == {"ann"}
    assert asked == ["ann", "down"]
    clock.now += 100
    assert storage.figures().age == 100
    assert len(asked) == 2, "it took ten seconds, so it is not asked every minute"
    clock.now += 101
    told = storage.figures().age
    assert told is not None
    assert told >= 201, "the old ones are told while new ones are taken"
    wait_for(lambda: storage.figures().age == 0)
    assert len(asked) == 4
    storage.close()
    clock.now += 1000
    assert storage.figures().age == 1000
    assert len(asked) == 4


# --- quotas, as turns meet them ---------------------------------------------------------------


def quota_of(tmp_path: Path, engine: Engine, quota: int) -> Backend:
    policy = Policy(lease=5, grace=10, quota=quota)
    return Backend(engine, lambda t: DiskStore(tmp_path / "store", t), BackendConfig(tenants={"ann": policy}))


def turns_until_refused(backend: Backend, tenant: str, session: str) -> int:
    for number in range(200):
        try:
            heard(backend.turn(tenant, session, user(f"{number} " * 20), SHORT))
        except QuotaExceeded:
            return number
    raise AssertionError("it was never refused")


def test_at_its_quota_a_tenant_is_refused_before_anything_is_said(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    backend = quota_of(tmp_path, make_engine(), 200_000)
    with closing(backend):
        session = backend.create("ann").id
        number = turns_until_refused(backend, "ann", session)
        assert backend.load().unsaved == 0
        assert number > 0
        view = backend.get("ann", session)
        assert len(view.messages) == 2 * number, "what was refused was not taken"
        assert backend.usage("ann").total <= 200_000
        other = backend.create(T).id
        heard(backend.turn(T, other, user("nobody else is concerned"), SHORT))
        _, _, ended = heard(backend.complete("ann", user("no session"), SHORT, Keep.NOTHING))
        assert ended.save_error is None
        backend.delete("ann", session)


def test_a_turn_that_does_not_fit_stays_in_memory_and_says_so(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    """It was let in by what it was thought to take, and took more."""
    backend = quota_of(tmp_path, make_engine(), 10**9)
    with closing(backend):
        session = backend.create("ann").id
        turn = backend.turn("ann", session, user("hello"), SHORT)
        next(turn)
        kept = backend._kept("ann")
        kept.quota._most = kept.store.usage()
        before = {info.blob for info in kept.store.list_blobs()}
        *_, ended = turn
        assert isinstance(ended.save_error, QuotaExceeded)  # type: ignore[union-attr]
        assert {info.blob for info in kept.store.list_blobs()} == before
        assert backend.load().unsaved == 1
        with pytest.raises(QuotaExceeded):
            backend.save("ann", session)
        kept.quota._most = 10**9
        backend.save("ann", session)
        assert backend.load().unsaved == 0
        assert len(backend.get("ann", session).messages) == 2


def test_a_call_of_openais_is_answered_and_not_kept(make_engine: MakeEngine, tmp_path: Path) -> None:
    backend = quota_of(tmp_path, make_engine(), 1000)
    with closing(backend):
        _, said, ended = heard(backend.complete("ann", user("hello"), SHORT, Keep.PAST))
        assert said
        assert isinstance(ended.save_error, QuotaExceeded)
        assert backend.load().unsaved == 0
