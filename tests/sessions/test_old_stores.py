"""Stores and archives that earlier builds wrote open, go on, and are checked, for ever. They were written by
tests/golden/stores.py in checkouts of those commits, with models that lie beside it."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from serialization.archive import check_archive
from serialization.blobs import BlobClass, Store, blob_class
from serialization.chunks import CHUNK_TOKENS
from serialization.manifest import Manifest
from serialization.migrate.steps import manifest_version
from sessions.check import rebuild_refs
from sessions.conversation import Conversation, Reply
from sessions.keyring.master import MasterKeys
from sessions.keyring.ring import Keyring
from sessions.manager import SessionManager
from sessions.named_turn import named_turn
from sessions.policy import Policy
from sessions.restore import Reason
from sessions.stores.open import open_store
from tests.golden.stores import HERE, MASTER, TALKS, engine_of

STORES = HERE / "stores"
COMMITS = sorted(path.stem for path in STORES.glob("*.zip"))
#: Those whose builds stored drafts, and sealed.
DRAFTING = ("7aa47a1", "98b440c")
SEALING = ("98b440c",)
OLD = [*((commit, "clear") for commit in COMMITS), *((commit, "sealed") for commit in SEALING)]
POLICY = Policy(lease=5, grace=10)
SAID = {name: texts for name, _, texts in TALKS}
MODELS = {name: of for name, of, _ in TALKS} | {"branch": "llama"}

Opened = Callable[[], Store]


def extracted(commit: str, folder: Path) -> Path:
    with zipfile.ZipFile(STORES / f"{commit}.zip") as archive:
        archive.extractall(folder)
    for path in folder.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return folder


@pytest.fixture(params=OLD, ids="-".join)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Opened]:
    """The commit, and its store, opened anew by each call."""
    commit, kind = request.param
    folder = extracted(commit, tmp_path)
    keyring = Keyring(folder / "keys", MasterKeys([MASTER])) if kind == "sealed" else None
    return commit, lambda: open_store(str(folder / kind), keyring=keyring)


def manager_of(store: Store, name: str, drafts: bool = False) -> SessionManager:
    return SessionManager(store, engine_of(MODELS[name], drafts), POLICY)


def versions(store: Store) -> Iterator[int]:
    for info in store.list_blobs():
        if blob_class(info.blob) is BlobClass.MANIFEST:
            yield manifest_version(store.get(info.blob))


def test_there_are_stores_of_builds_before_and_after_drafts_and_seals() -> None:
    assert set(COMMITS) > set(DRAFTING) > set(SEALING)


def test_an_old_store_is_checked_clean_and_lists_its_sessions(old: tuple[str, Opened]) -> None:
    store = old[1]()
    assert set(versions(store)) == {1}
    manager = manager_of(store, "tea")
    assert manager.check().clean
    assert {info.name for info in manager.list()} == {"tea", "window", "draft", "branch"}
    assert [pin.name for pin in manager.pins()] == ["kept"]
    assert manager.unreadable() == {}
    manager.collect(manager.plan_gc())
    assert manager.check().clean
    store.close()


@pytest.mark.parametrize("name", MODELS)
def test_an_old_session_goes_on_where_it_stopped(old: tuple[str, Opened], name: str) -> None:
    """No token is read again, whole chunks are named again, and the turn before is still there."""
    commit, opened = old
    store = opened()
    manager = manager_of(store, name, drafts=name == "draft")
    before = manager.manifest(name)
    said = [message.text for message in before.messages if message.role == "user"]
    assert said == list(SAID.get(name, SAID["tea"]))
    session = manager.open(name)
    seq, result = manager.resume(session)
    assert result.reason in (Reason.EXACT, Reason.COMPATIBLE)
    assert (result.restored, result.recomputed) == (before.length, 0)
    drafted = name == "draft" and commit in DRAFTING
    assert (before.draft is not None) == drafted
    assert result.draft_restored == (before.draft.length if before.draft else 0)
    manager.engine.close(seq)
    session.close()

    chat = Conversation.open(manager, name)
    assert list(chat.say("What then?", Reply(max_tokens=4)))
    assert chat.save_error is None
    chat.close()
    after = manager.manifest(name)
    whole = [chunk for chunk in before.chunks if chunk.stop - chunk.start == CHUNK_TOKENS]
    assert list(after.chunks[: len(whole)]) == whole
    assert after.messages[: len(before.messages)] == before.messages
    assert after.generation == before.generation + 1
    assert set(versions(store)) == {1, 2}
    assert named_turn(store, f"{name}@{before.generation}") == before
    assert manager.check().clean
    store.close()


def test_old_and_new_turns_live_together_through_forks_rewinds_and_repairs(old: tuple[str, Opened]) -> None:
    store = old[1]()
    manager = manager_of(store, "tea")
    tea = manager.manifest("tea")
    branch = manager.manifest("branch")
    assert branch.forked_from is not None
    assert branch.tokens == tea.tokens
    assert manager.load("kept").length == tea.length
    assert manager.fork("tea", "again").length == tea.length
    assert manager.rewind("tea").generation == tea.generation + 1
    assert set(versions(store)) == {1, 2}
    listed = {(info.id, info.name, info.generation, info.length, info.pins) for info in manager.list()}
    found = rebuild_refs(store)
    assert (found.lost, found.newer) == ((), ())
    store.rebuild(found.refs)
    assert {(i.id, i.name, i.generation, i.length, i.pins) for i in manager.list()} == listed
    assert manager.check().clean
    store.close()


@pytest.mark.parametrize("commit", COMMITS)
def test_an_old_archive_is_imported_and_goes_on(commit: str, tmp_path: Path) -> None:
    folder = extracted(commit, tmp_path)
    with (folder / "tea.tenuto").open("rb") as file:
        told: Manifest = check_archive(file)
    store = open_store(str(folder / "new"))
    manager = manager_of(store, "tea")
    with (folder / "tea.tenuto").open("rb") as file:
        info = manager.import_(file)
    assert info.length == told.length
    session = manager.open(info.id)
    seq, result = manager.resume(session)
    assert result.restored == told.length
    manager.engine.close(seq)
    session.close()
    assert set(versions(store)) == {2}
    store.close()
