"""Conversations over a sealed store are as over any other, and nobody finds a byte of them there."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest

from engine.errors import IndexDamaged, SealRefused
from serialization.blobs import Store, is_sealed
from sessions.conversation import Conversation
from sessions.keyring.keyset import Scope
from sessions.keyring.master import MasterKeys
from sessions.keyring.ring import Keyring
from sessions.manager import SessionManager
from sessions.restore import Reason
from sessions.stores.base import StoreConfig
from sessions.stores.disk import DiskStore
from sessions.stores.index import INDEX
from sessions.stores.memory import MemoryBacking, MemoryStore
from sessions.stores.open import open_store
from sessions.stores.sealing import sealed_store
from tests.redis_server import RedisServer
from tests.sessions.conftest import MakeEngine
from tests.sessions.sealing import (
    NAME,
    PIN,
    POLICY,
    SHORT,
    files,
    found_in,
    key_bytes,
    redis_values,
    ring,
    talk,
    told,
)


@pytest.fixture
def keyring(tmp_path: Path) -> Keyring:
    return ring(tmp_path / "keys")


@pytest.fixture
def sealed(tmp_path: Path, keyring: Keyring) -> Store:
    return open_store(str(tmp_path / "store"), keyring=keyring)


@pytest.fixture
def manager(sealed: Store, make_engine: MakeEngine) -> SessionManager:
    return SessionManager(sealed, make_engine(), POLICY)


# --- nobody finds anything ------------------------------------------------------------------


def test_what_is_looked_for_is_found_in_a_store_in_the_clear(tmp_path: Path, make_engine: MakeEngine) -> None:
    """Else the next laws would hold of anything."""
    manager = SessionManager(DiskStore(tmp_path / "store"), make_engine(), POLICY)
    secrets = told(manager, talk(manager))
    manager.store.close()
    missed = set(secrets) - found_in(files(tmp_path / "store"), secrets)
    forms = {name for name in secrets if name.startswith("tokens")}
    assert missed <= forms - {name for name in forms if name.startswith("tokens of 2 bytes at")}


def test_no_byte_of_a_conversation_or_a_key_is_in_any_file(
    manager: SessionManager, keyring: Keyring, tmp_path: Path
) -> None:
    session = talk(manager)
    manager.collect(manager.plan_gc())
    manager.repair()
    secrets = {**told(manager, session), **key_bytes(keyring, tmp_path / "keys")}
    assert len(secrets) > 30
    assert found_in(files(tmp_path / "store"), secrets) == set()
    manager.store.close()
    assert found_in(files(tmp_path / "store"), secrets) == set()


@pytest.mark.redis
def test_no_byte_of_a_conversation_or_a_key_is_in_redis_or_a_tier(
    redis_server: RedisServer, keyring: Keyring, tmp_path: Path, make_engine: MakeEngine
) -> None:
    client = redis_server.client()
    client.flushall()
    url = f"tiered:memory=1M,disk=10M@{tmp_path}/tier,{redis_server.url}"
    manager = SessionManager(open_store(url, keyring=keyring), make_engine(), POLICY)
    session = talk(manager)
    secrets = {**told(manager, session), **key_bytes(keyring, tmp_path / "keys")}
    assert found_in(redis_values(client), secrets) == set()
    assert found_in(files(tmp_path / "tier"), secrets) == set()
    tiers = manager.store._inner._caches  # type: ignore[attr-defined]
    held = tiers[0]._store._held
    assert held.blobs
    assert found_in(iter([data for data, _ in held.blobs.values()]), secrets) == set()
    client.close()
    manager.store.close()


def test_key_files_hold_no_secret_that_is_not_wrapped(
    manager: SessionManager, keyring: Keyring, tmp_path: Path
) -> None:
    session = talk(manager)
    secrets = {**told(manager, session), **key_bytes(keyring, tmp_path / "keys")}
    own = {name for name in secrets if name.startswith("what ")}
    assert found_in(files(tmp_path / "keys"), secrets) == {name for name in own if "hex" not in name}


# --- and they are as any other --------------------------------------------------------------


def test_a_sealed_conversation_goes_on_to_the_bit(
    manager: SessionManager, tmp_path: Path, make_engine: MakeEngine
) -> None:
    clear = SessionManager(MemoryStore(), make_engine(), POLICY)
    said = []
    for each in (manager, clear):
        session = talk(each)
        chat = Conversation.open(each, session)
        assert chat.restored is not None
        assert (chat.restored.reason, chat.restored.recomputed) == (Reason.EXACT, 0)
        said.append("".join(piece.text for piece in chat.say("more", SHORT)))
        assert chat.save_error is None
        chat.close()
    assert said[0] == said[1]


def test_every_verb_works_and_what_is_named_is_sealed(manager: SessionManager) -> None:
    session = talk(manager)
    fork = next(info.id for info in manager.list() if info.id != session)
    manager.rename(fork, "renamed")
    assert manager.info("renamed").id == fork
    assert manager.load(PIN).length == manager.info(session).length
    assert manager.rewind(session).turns == 2
    assert manager.info(NAME).id == session
    assert manager.info(session[:20]).id == session
    manager.release_rows("renamed")
    manager.delete("renamed")
    assert manager.check().clean
    assert all(is_sealed(ref.blob) for ref in manager.manifest(session).blobs())
    manager.collect(manager.plan_gc())
    assert manager.check().clean


def test_equal_pasts_are_stored_once_within_a_tenant(manager: SessionManager, sealed: Store) -> None:
    talk(manager)
    once = {info.blob for info in sealed.list_blobs() if not info.blob.startswith("manifest")}
    talk(manager, None)
    twice = {info.blob for info in sealed.list_blobs() if not info.blob.startswith("manifest")}
    assert once & twice
    assert len(twice) < 2 * len(once)


def test_a_past_known_in_another_session_is_shared(manager: SessionManager) -> None:
    talk(manager)
    chat = Conversation.new(manager, system="You are a quokka in a library.")
    for _ in chat.say("zebra crossing is where we begin " * 20, SHORT):
        pass
    assert chat.reused is not None
    assert chat.reused.reason is Reason.PREFIX
    chat.close()


def test_a_damaged_index_is_rebuilt_from_sealed_manifests(
    manager: SessionManager, sealed: Store, tmp_path: Path, keyring: Keyring
) -> None:
    session = talk(manager)
    before = {info.id for info in manager.list()}
    sealed.close()
    for path in (tmp_path / "store").rglob(f"{INDEX}*"):
        path.write_bytes(b"damaged" * 100)
    others = Keyring(tmp_path / "others", MasterKeys([b"x" * 32]))
    for other in (None, others, others):
        with pytest.raises(SealRefused):
            open_store(str(tmp_path / "store"), keyring=other)
        others.tenant("default").make()  # a repair by other keys would find nothing, and write that
    mended = SessionManager(open_store(str(tmp_path / "store"), keyring=keyring), policy=POLICY)
    report = mended.repair()
    assert any("rebuilt the index" in line for line in report.repaired)
    assert report.clean
    assert {info.id for info in mended.list()} == before
    assert mended.info(NAME).id == session
    mended.store.close()
    with pytest.raises(SealRefused):
        open_store(str(tmp_path / "store"))
    open_store(str(tmp_path / "store"), keyring=keyring).close()


def test_an_archive_of_a_sealed_session_opens_anywhere_and_comes_back(
    manager: SessionManager, keyring: Keyring, make_engine: MakeEngine
) -> None:
    session = talk(manager)
    out = io.BytesIO()
    assert manager.export(session, out).nbytes == len(out.getvalue())
    clear = SessionManager(MemoryStore(), make_engine(), POLICY)
    out.seek(0)
    imported = clear.import_(out)
    manifest = clear.manifest(imported.id)
    assert manifest.tokens == manager.manifest(session).tokens
    assert not any(is_sealed(ref.blob) for ref in manifest.blobs())
    assert clear.check().clean
    back = io.BytesIO()
    clear.export(imported.id, back)
    back.seek(0)
    again = manager.import_(back)
    assert all(is_sealed(ref.blob) for ref in manager.manifest(again.id).blobs())
    chat = Conversation.open(manager, again.id)
    assert chat.restored is not None
    assert (chat.restored.reason, chat.restored.recomputed) == (Reason.EXACT, 0)
    chat.close()


# --- sealed or in the clear, and never by accident ------------------------------------------


def test_a_sealed_store_is_refused_without_its_keys(
    manager: SessionManager, tmp_path: Path, keyring: Keyring
) -> None:
    talk(manager)
    before = manager.list()
    path = str(tmp_path / "store")
    with pytest.raises(SealRefused, match="sealed: give the folder"):
        open_store(path)
    with pytest.raises(SealRefused, match="another master key"):
        open_store(path, keyring=Keyring(tmp_path / "keys", MasterKeys([b"x" * 32])))
    with pytest.raises(SealRefused, match="no keys of default"):
        open_store(path, keyring=ring(tmp_path / "other keys"))
    ring(tmp_path / "other keys").tenant("default").make()
    with pytest.raises(SealRefused, match="other keys"):
        open_store(path, keyring=ring(tmp_path / "other keys"))
    assert manager.list() == before
    assert manager.check().clean


def test_a_store_in_the_clear_is_not_sealed_by_giving_keys(
    tmp_path: Path, make_engine: MakeEngine, keyring: Keyring
) -> None:
    clear = SessionManager(DiskStore(tmp_path / "clear"), make_engine(), POLICY)
    session = talk(clear)
    with pytest.raises(SealRefused, match="lies in the clear"):
        open_store(str(tmp_path / "clear"), keyring=keyring)
    assert not keyring.tenant("default").exist()
    assert SessionManager(open_store(str(tmp_path / "clear"))).info(NAME).id == session


def test_a_new_store_is_what_it_is_opened_as_first(tmp_path: Path, keyring: Keyring) -> None:
    open_store(str(tmp_path / "a"), keyring=keyring).close()
    with pytest.raises(SealRefused):
        open_store(str(tmp_path / "a"))
    clear = open_store(str(tmp_path / "b"))
    clear.swap("session/x", None, b"x")
    clear.close()
    with pytest.raises(SealRefused):
        open_store(str(tmp_path / "b"), keyring=keyring)


# --- a key for each session -----------------------------------------------------------------


@pytest.fixture
def each(tmp_path: Path, make_engine: MakeEngine) -> SessionManager:
    keyring = ring(tmp_path / "keys", Scope.SESSION)
    return SessionManager(open_store(str(tmp_path / "store"), keyring=keyring), make_engine(), POLICY)


def test_with_a_key_for_each_session_none_names_a_blob_of_another(each: SessionManager) -> None:
    session = talk(each)
    each.load(PIN)
    talk(each, None)
    named = [{ref.blob for ref in each.manifest(info.id).blobs()} for info in each.list()]
    assert len(named) == 5
    for number, one in enumerate(named):
        assert one
        assert not any(one & other for other in named[number + 1 :])
    assert each.check().clean
    out = io.BytesIO()
    each.export(session, out)
    out.seek(0)
    imported = each.import_(out)
    for info in (imported, *each.list()):
        chat = Conversation.open(each, info.id)
        assert chat.restored is not None
        assert chat.restored.recomputed == 0
        chat.close()


def test_with_a_key_for_each_session_nothing_is_found_either(each: SessionManager, tmp_path: Path) -> None:
    keyring = ring(tmp_path / "keys")
    secrets = {**told(each, talk(each)), **key_bytes(keyring, tmp_path / "keys")}
    assert found_in(files(tmp_path / "store"), secrets) == set()


def test_the_store_is_moved_with_its_keys_in_another_folder(manager: SessionManager, tmp_path: Path) -> None:
    session = talk(manager)
    manager.store.close()
    shutil.copytree(tmp_path / "store", tmp_path / "elsewhere")
    shutil.copytree(tmp_path / "keys", tmp_path / "keys elsewhere")
    moved = SessionManager(open_store(str(tmp_path / "elsewhere"), keyring=ring(tmp_path / "keys elsewhere")))
    assert moved.info(NAME).id == session
    assert moved.check().clean


def test_an_old_ref_that_is_put_back_is_the_old_turn_whole(manager: SessionManager, sealed: Store) -> None:
    """Nobody can tell it from one that was never replaced. Put in another's place it is refused."""
    session = talk(manager, None)
    beneath, ciphers = sealed._inner, sealed._keys.current()  # type: ignore[attr-defined]
    name, *others = (ciphers.ref_name(f"session/{id_}") for id_ in (session, manager.list()[0].id))
    old, before = manager.manifest(session), beneath.read(name)
    chat = Conversation.open(manager, session)
    for _ in chat.say("what nobody is to hear again", SHORT):
        pass
    chat.close()
    assert manager.manifest(session).generation == old.generation + 1
    assert beneath.swap(name, beneath.read(name), before)
    assert manager.manifest(session) == old
    again = Conversation.open(manager, session)
    assert again.restored is not None
    assert again.restored.reason is Reason.EXACT
    assert again.messages == old.messages
    again.close()
    for other in others:
        assert beneath.swap(other, beneath.read(other), before)
        with pytest.raises(IndexDamaged):
            manager.list()


def test_tenants_cannot_read_each_other(tmp_path: Path, keyring: Keyring, make_engine: MakeEngine) -> None:
    """Even where one is given the other's whole store."""
    backings: dict[str, MemoryBacking] = {}
    inner, config = MemoryStore(backings, "theirs"), StoreConfig()
    talk(SessionManager(sealed_store(inner, keyring, "theirs", config), make_engine(), POLICY))
    with pytest.raises(SealRefused, match="no keys of ours"):
        sealed_store(inner, keyring, "ours", config)
    keyring.tenant("ours").make()
    with pytest.raises(SealRefused, match="other keys"):
        sealed_store(inner, keyring, "ours", config)
