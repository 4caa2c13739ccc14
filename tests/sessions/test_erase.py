"""Erased is unreadable: in the store, in running processes, and in a backup that was made before."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from engine.errors import (
    Corrupt,
    Erased,
    KeyRefused,
    SealRefused,
    SessionNotFound,
    StoreUnavailable,
    TenutoError,
    UsageError,
)
from serialization.blobs import Store, is_sealed
from serialization.sealed import read_blob
from sessions.catalog import Catalog
from sessions.erase import erase_session, erase_tenant
from sessions.keyring.keyset import Scope
from sessions.keyring.master import MasterKeys
from sessions.keyring.ring import Keyring
from sessions.keys import ApiKeys
from sessions.manager import SessionManager
from sessions.stores.disk import DiskStore
from sessions.stores.memory import MemoryStore
from sessions.stores.open import open_store, opened_raw
from tests.faults import FaultyStore
from tests.sessions.conftest import MakeEngine
from tests.sessions.sealing import NAME, POLICY, files, found_in, ring, talk, told


@pytest.fixture
def keyring(tmp_path: Path) -> Keyring:
    return ring(tmp_path / "keys")


def erase(tmp_path: Path, tenant: str = "default") -> object:
    with opened_raw(str(tmp_path / "store"), tenant) as store:
        return erase_tenant(store, tmp_path / "keys", tenant)


def test_nothing_of_an_erased_tenant_can_be_read_from_a_backup(
    tmp_path: Path, keyring: Keyring, make_engine: MakeEngine
) -> None:
    """Not with the master key, nor with the keys that a later life of the tenant has."""
    manager = SessionManager(open_store(str(tmp_path / "store"), keyring=keyring), make_engine(), POLICY)
    secrets = told(manager, talk(manager))
    shutil.copytree(tmp_path / "store", tmp_path / "backup")
    restored = open_store(str(tmp_path / "backup"), keyring=keyring)
    assert SessionManager(restored).info(NAME)  # the backup was a good one
    blobs = [info.blob for info in restored.list_blobs()]
    assert len(blobs) > 5

    done = erase(tmp_path)
    assert done.keys  # type: ignore[attr-defined]
    for act in (
        lambda: open_store(str(tmp_path / "backup"), keyring=ring(tmp_path / "keys")),
        lambda: restored.get(blobs[0]),
        lambda: SessionManager(restored).list(),
    ):
        with pytest.raises(Erased, match="destroyed on"):
            act()
    with pytest.raises(SealRefused):
        open_store(str(tmp_path / "backup"))
    ring(tmp_path / "keys").tenant("default").renew()
    with pytest.raises(SealRefused, match="other keys"):
        open_store(str(tmp_path / "backup"), keyring=ring(tmp_path / "keys"))
    for blob in blobs:
        with pytest.raises(Corrupt):
            restored.get(blob)
    assert found_in(files(tmp_path / "backup"), secrets) == set()
    assert found_in(files(tmp_path / "keys"), secrets) == set()
    restored.close()


def test_a_running_process_reads_nothing_from_then_on(
    tmp_path: Path, keyring: Keyring, make_engine: MakeEngine
) -> None:
    url = f"tiered:memory=10M,disk=10M@{tmp_path}/tier,{tmp_path}/store"
    manager = SessionManager(open_store(url, keyring=keyring), make_engine(), POLICY)
    session = talk(manager)
    blobs = [ref.blob for ref in manager.manifest(session).blobs()]
    with opened_raw(url, "default") as store:
        erase_tenant(store, tmp_path / "keys", "default")
    for blob in blobs:
        with pytest.raises(TenutoError):
            manager.store.get(blob)
    with pytest.raises(Erased):
        talk(manager)
    assert not [path for path in (tmp_path / "tier").rglob("k3-*")]
    assert not [path for path in (tmp_path / "store").rglob("k3-*")]


def test_an_erased_tenant_begins_anew_only_when_told(
    tmp_path: Path, keyring: Keyring, make_engine: MakeEngine
) -> None:
    talk(SessionManager(open_store(str(tmp_path / "store"), keyring=keyring), make_engine(), POLICY))
    erase(tmp_path)
    with pytest.raises(Erased):
        open_store(str(tmp_path / "store"), keyring=keyring)
    keyring.tenant("default").renew()
    manager = SessionManager(open_store(str(tmp_path / "store"), keyring=keyring), make_engine(), POLICY)
    assert manager.list() == []
    talk(manager)
    assert manager.check().clean


def test_other_tenants_stay_and_api_keys_of_this_one_are_revoked(
    tmp_path: Path, keyring: Keyring, make_engine: MakeEngine
) -> None:
    api = ApiKeys(tmp_path / "keys")
    texts = {tenant: api.create(tenant)[1] for tenant in ("default", "other")}
    for tenant in texts:
        store = open_store(str(tmp_path / "store"), tenant, keyring=keyring)
        talk(SessionManager(store, make_engine(), POLICY, tenant=tenant))
    done = erase(tmp_path)
    assert done.api_keys == 1  # type: ignore[attr-defined]
    with pytest.raises(KeyRefused):
        api.find(texts["default"])
    assert api.find(texts["other"]).tenant == "other"
    kept = open_store(str(tmp_path / "store"), "other", keyring=keyring)
    assert SessionManager(kept, tenant="other").check().clean
    assert SessionManager(kept, tenant="other").info(NAME)


def test_what_is_in_the_clear_is_deleted_and_said_not_to_be_covered(
    tmp_path: Path, make_engine: MakeEngine
) -> None:
    manager = SessionManager(DiskStore(tmp_path / "store"), make_engine(), POLICY)
    secrets = told(manager, talk(manager))
    manager.store.rebuild(dict(manager.store.list_refs("")))  # which sets the index aside
    manager.store.close()
    done = erase(tmp_path)
    assert (done.keys, done.api_keys) == (False, 0)  # type: ignore[attr-defined]
    assert found_in(files(tmp_path / "store"), secrets) == set()
    assert SessionManager(open_store(str(tmp_path / "store"))).list() == []


def test_a_sealed_store_is_not_erased_without_its_keys(
    tmp_path: Path, keyring: Keyring, make_engine: MakeEngine
) -> None:
    """Deleting this one would leave every backup readable, and look as if it were done."""
    manager = SessionManager(open_store(str(tmp_path / "store"), keyring=keyring), make_engine(), POLICY)
    talk(manager)
    with opened_raw(str(tmp_path / "store"), "default") as store, pytest.raises(SealRefused):
        erase_tenant(store, tmp_path / "other keys", "default")
    assert manager.check().clean


def test_keys_are_destroyed_first_and_the_rest_can_be_done_again(
    tmp_path: Path, keyring: Keyring, make_engine: MakeEngine
) -> None:
    class Unreachable(FaultyStore):
        def wipe(self) -> None:
            raise StoreUnavailable("as planned")

    manager = SessionManager(open_store(str(tmp_path / "store"), keyring=keyring), make_engine(), POLICY)
    talk(manager)
    with opened_raw(str(tmp_path / "store"), "default") as store:
        with pytest.raises(StoreUnavailable):
            erase_tenant(Unreachable(store), tmp_path / "keys", "default")
        with pytest.raises(Erased):
            manager.list()
        assert list(store.list_blobs())
        assert erase_tenant(store, tmp_path / "keys", "default").keys
        assert not list(store.list_blobs())


# --- one session ----------------------------------------------------------------------------


def test_an_erased_session_is_unreadable_in_a_backup_and_its_fork_is_not(
    tmp_path: Path, make_engine: MakeEngine
) -> None:
    keyring = ring(tmp_path / "keys", Scope.SESSION)
    manager = SessionManager(open_store(str(tmp_path / "store"), keyring=keyring), make_engine(), POLICY)
    session = talk(manager)
    fork = next(info.id for info in manager.list() if info.id != session)
    mine = {ref.blob for ref in manager.manifest(session).blobs()}
    own_set = {read_blob(blob, manager.store._inner.get(blob)).set_id for blob in mine}  # type: ignore[attr-defined]
    shutil.copytree(tmp_path / "store", tmp_path / "backup")
    assert erase_session(manager, keyring.tenant("default"), NAME) == session
    with pytest.raises(SessionNotFound):
        manager.info(session)
    assert manager.pins() == []
    assert manager.check().clean

    backup = open_store(str(tmp_path / "backup"), keyring=keyring)
    unreadable = Catalog(backup).unreadable()
    assert any(session in ref for ref in unreadable)
    for info in backup.list_blobs():
        assert is_sealed(info.blob)
        if read_blob(info.blob, backup._inner.get(info.blob)).set_id in own_set:  # type: ignore[attr-defined]
            with pytest.raises(Corrupt):
                backup.get(info.blob)
    for place in (manager, SessionManager(backup, make_engine(), POLICY)):
        opened = place.open(fork)
        _, result = place.resume(opened)
        assert result.recomputed == 0
        opened.close()


def test_sessions_that_share_their_tenants_keys_go_with_it_alone(
    tmp_path: Path, keyring: Keyring, make_engine: MakeEngine
) -> None:
    manager = SessionManager(open_store(str(tmp_path / "store"), keyring=keyring), make_engine(), POLICY)
    talk(manager)
    with pytest.raises(UsageError, match="no keys of their own"):
        erase_session(manager, keyring.tenant("default"), NAME)
    assert manager.info(NAME)


def test_a_store_in_memory_can_be_erased_too(tmp_path: Path) -> None:
    store: Store = MemoryStore()
    store.swap("s", None, b"x")
    assert not erase_tenant(store, tmp_path / "keys", "default").keys
    assert store.read("s") is None
    assert Keyring(tmp_path / "keys", MasterKeys()).files() == []
