"""Retention runs by itself: every tenant's store is swept, by one process at a time, and what it did is
told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.errors import BlobMissing, StoreUnavailable
from engine.runner import Engine
from serialization.blobs import BlobClass, BlobId, Store
from sessions.manager import SessionManager
from sessions.names import session_ref
from sessions.policy import Policy
from sessions.service.backend import Backend, BackendConfig
from sessions.service.config import ServiceConfig
from sessions.service.sweeper import SWEEPER, Sweeper, Swept, sweep
from sessions.stores.disk import DiskStore
from sessions.stores.memory import MemoryBacking, MemoryStore
from tests.faults import FaultyStore
from tests.sessions.clock import Clock
from tests.sessions.conftest import MakeEngine
from tests.sessions.service.hearing import SHORT, T, heard, user, wait_for
from tests.sessions.service.serving import served
from tests.sessions.service.test_serve import begin, serving
from tests.sessions.test_gc import save

EVERY = 600.0
POLICY = Policy(lease=10, grace=100, session_ttl=1000.0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def manager(engine: Engine, clock: Clock) -> SessionManager:
    return SessionManager(MemoryStore(clock=clock), engine, POLICY)


def test_a_sweep_is_what_gc_does(manager: SessionManager, clock: Clock) -> None:
    old = save(manager, "old " * 100)
    clock.now += 1001
    young = save(manager, "young " * 100)
    result = sweep(manager, EVERY)
    assert result is not None
    assert result.expired == (old,)
    clock.now += EVERY
    result = sweep(manager, EVERY)
    assert result is not None
    assert result.num_blobs > 0
    assert [info.id for info in manager.list()] == [young]
    assert manager.check().clean


def test_what_was_swept_a_moment_ago_is_not_due(manager: SessionManager, clock: Clock) -> None:
    assert sweep(manager, EVERY) is not None
    clock.now += EVERY / 2
    assert sweep(manager, EVERY) is None
    clock.now += EVERY / 2
    assert sweep(manager, EVERY) is not None
    clock.now -= 10 * EVERY  # a clock that went back delays nothing for long
    assert sweep(manager, EVERY) is not None


@pytest.mark.parametrize("value", [b"", b"x" * 7, b"\xff" * 8])
def test_a_damaged_note_of_the_last_sweep_is_none(manager: SessionManager, value: bytes) -> None:
    manager.store.hint({"swept": value})
    assert sweep(manager, EVERY) is not None


def test_of_many_processes_one_sweeps(manager: SessionManager) -> None:
    with closing(manager.commits.lease(SWEEPER)):
        assert sweep(manager, EVERY) is None
    assert sweep(manager, EVERY) is not None
    assert manager.store.read(f"lease/{SWEEPER}") is None, "its lease was given back"


def test_many_at_once_sweep_once(engine: Engine) -> None:
    backings: dict[str, MemoryBacking] = {}
    done: list[Swept] = []

    @contextmanager
    def managed(tenant: str) -> Iterator[SessionManager]:
        yield SessionManager(MemoryStore(backings, tenant), engine, POLICY)

    sweepers = [Sweeper(managed, lambda: ["ann", "bob"], EVERY, done.append) for _ in range(6)]
    threads = [threading.Thread(target=sweeper.round) for sweeper in sweepers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(swept.tenant for swept in done) == ["ann", "bob"]


def test_nothing_is_swept_on_a_guess(manager: SessionManager, clock: Clock) -> None:
    session = save(manager, "words")
    value = manager.store.read(session_ref(session))
    assert value is not None
    manager.store.delete_blob(BlobId(value.decode()), 0)
    clock.now += 10_000
    with pytest.raises(BlobMissing):
        sweep(manager, EVERY)
    assert manager.store.read("swept") is None


@pytest.mark.parametrize("fault", [StoreUnavailable("down"), RuntimeError("a bug")])
def test_what_fails_for_one_is_told_and_ends_the_sweeps_of_none(engine: Engine, fault: Exception) -> None:
    done: list[Swept] = []

    @contextmanager
    def managed(tenant: str) -> Iterator[SessionManager]:
        if tenant == "bad":
            raise fault
        yield SessionManager(MemoryStore(tenant=tenant), engine, POLICY)

    sweeper = Sweeper(managed, lambda: ["a", "bad", "c"], 0.05, done.append)
    sweeper.start()
    wait_for(lambda: {swept.tenant for swept in done} == {"a", "bad", "c"} and len(done) > 6)
    sweeper.close()
    assert {type(swept.error) for swept in done if swept.tenant == "bad"} == {type(fault)}
    assert all(swept.result is not None for swept in done if swept.tenant != "bad")


def test_a_pinned_session_and_one_that_is_written_to_are_spared(
    manager: SessionManager, clock: Clock
) -> None:
    pinned, written = save(manager, "pinned"), save(manager, "written")
    manager.pin(pinned, "kept")
    clock.now += 1001
    with closing(manager.open(written)):
        result = sweep(manager, EVERY)
    assert result is not None
    assert (result.expired, result.skipped) == ((), (written,))
    assert {info.id for info in manager.list()} == {pinned, written}


# --- in the service ---------------------------------------------------------------------------


def test_the_service_sweeps_and_tells_of_it(make_engine: MakeEngine, tmp_path: Path) -> None:
    policy = Policy(lease=0.2, grace=0.3, session_ttl=0.5)
    backend = Backend(
        make_engine(),
        lambda tenant: DiskStore(tmp_path / "store", tenant),
        BackendConfig(policy=Policy(), tenants={T: policy}),
    )
    with closing(backend):
        session = backend.create(T, "short-lived").id
        heard(backend.turn(T, session, user("hello"), SHORT))
        with served(backend, ServiceConfig(sweep=0.2)) as at:
            wait_for(lambda: at.client.get(f"/v1/sessions/{session}").status_code == 404, 60)

            def swept() -> list[dict[str, Any]]:
                return [line for line in at.lines() if line["event"] == "swept"]

            wait_for(lambda: sum(line["num_blobs"] for line in swept()) > 1, 60)
            assert sum(line["expired"] for line in swept()) == 1
            assert all(T not in line["tenant"] for line in swept())
            text = at.client.get("/metrics").text
            assert 'tenuto_swept_sessions_total{what="expired"} 1.0' in text
            assert 'tenuto_sweeps_total{outcome="done"}' in text


def test_a_sweep_that_fails_is_counted_and_logged(make_engine: MakeEngine) -> None:
    store = FaultyStore(MemoryStore())

    def open_store(tenant: str) -> Store:
        return store

    backend = Backend(make_engine(), open_store, BackendConfig())
    with closing(backend), served(backend, ServiceConfig(sweep=0.1)) as at:
        backend.create(T)
        store.plan = "." * store.num_calls + "r" * 100_000
        wait_for(lambda: any(line["event"] == "sweep_failed" for line in at.lines()), 60)
        assert {line["error"] for line in at.lines() if line["event"] == "sweep_failed"} == {
            "StoreUnavailable"
        }
        store.plan = ""
        assert 'tenuto_sweeps_total{outcome="failed"}' in at.client.get("/metrics").text


def test_a_tenant_who_was_not_here_is_swept_too(make_engine: MakeEngine, tmp_path: Path) -> None:
    with closing(DiskStore(tmp_path / "store", "ann")) as disk:
        session = SessionManager(disk).create("hers")
        session.close()
        disk.put(BlobClass.ROWS, b"orphan")
    policy = Policy(lease=0.05, grace=0.1)
    backend = Backend(
        make_engine(),
        lambda tenant: DiskStore(tmp_path / "store", tenant),
        BackendConfig(policy=policy, tenants={"ann": replace(policy)}),
    )
    with closing(backend), served(backend, ServiceConfig(sweep=0.2)) as at:
        wait_for(lambda: "tenuto_swept_blobs_total 1.0" in at.client.get("/metrics").text, 60)


def test_serve_takes_its_limits_from_a_file(tiny_path: Path, tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text('quota = "1M"\n[tenants.default]\nquota = "2k"\nsession_ttl = "1h"\n')
    given = ("--tenants", str(tenants), "--sweep", "1h")
    with serving(tiny_path, tmp_path / "store", *given) as process, process.client() as client:
        told = client.get("/v1/storage").json()
        assert (told["quota_bytes"], told["session_ttl_seconds"]) == (2000, 3600.0)
        refused = client.post("/v1/sessions", json={"name": "talk"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "quota_exceeded")
        assert refused.json()["error"]["details"]["quota"] == 2000
    tenants.write_text("[tenants.ann]\nquotta = 1\n")
    with (
        pytest.raises(AssertionError, match=r"tenants\.ann\.quotta: no such field"),
        serving(tiny_path, tmp_path / "store", "--tenants", str(tenants)) as process,
    ):
        begin(process)
