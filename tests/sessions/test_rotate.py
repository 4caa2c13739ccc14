"""New keys in the place of old ones lose nothing, under load and at kill -9, and leave nothing to the old."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from engine.errors import TenutoError
from serialization.blobs import BlobClass, BlobId
from serialization.sealed import read_blob, read_ref
from sessions.conversation import Conversation
from sessions.keyring.keyset import Scope
from sessions.keyring.ring import Keyring
from sessions.manager import SessionManager
from sessions.restore import Reason
from sessions.rotate import reseal, rotate, rotate_and_drop
from sessions.stores.base import SEAL_NBYTES, StoreConfig
from sessions.stores.memory import MemoryBacking, MemoryStore
from sessions.stores.open import open_store
from sessions.stores.sealed import MARKER, SealedStore, roomier
from sessions.stores.sealing import sealed_store
from tests.faults import flip
from tests.sessions.conftest import MakeEngine
from tests.sessions.sealing import POLICY, SHORT, ring, talk

ROOT = Path(__file__).parents[2]
ROWS = BlobClass.ROWS


@pytest.fixture(params=list(Scope))
def keyring(tmp_path: Path, request: Any) -> Keyring:
    return ring(tmp_path / "keys", request.param)


@pytest.fixture
def held() -> dict[str, MemoryBacking]:
    return {}


@pytest.fixture
def store(held: dict[str, MemoryBacking], keyring: Keyring) -> SealedStore:
    config = StoreConfig()
    return sealed_store(MemoryStore(held, config=roomier(config)), keyring, "default", config)


def sealed_by(held: dict[str, MemoryBacking]) -> set[tuple[bytes, int]]:
    """Key set and number of the data key of everything that is stored."""
    (backing,) = held.values()
    blobs = [read_blob(blob, data) for blob, (data, _) in backing.blobs.items()]
    refs = [read_ref(value[SEAL_NBYTES:]) for name, value in backing.refs.items() if name != MARKER]
    return {(found.set_id, found.number) for found in (*blobs, *refs) if found is not None}


def test_after_a_rotation_everything_is_sealed_with_the_new_key(
    store: SealedStore, keyring: Keyring, held: dict[str, MemoryBacking], make_engine: MakeEngine
) -> None:
    manager = SessionManager(store, make_engine(), POLICY)
    session = talk(manager)
    names = {info.blob for info in store.list_blobs()}
    refs = sorted(name for name, _ in store.list_refs(""))
    assert {number for _, number in sealed_by(held)} == {1}
    done = rotate_and_drop(store, keyring.tenant("default"))
    assert (done.num_blobs, done.num_refs, done.problems) == (len(names), len(refs), ())
    assert {number for _, number in sealed_by(held)} == {2}
    assert {info.blob for info in store.list_blobs()} == names
    assert sorted(name for name, _ in store.list_refs("")) == refs
    assert manager.check().clean
    chat = Conversation.open(manager, session)
    assert chat.restored is not None
    assert (chat.restored.reason, chat.restored.recomputed) == (Reason.EXACT, 0)
    for _ in chat.say("more", SHORT):
        pass
    assert chat.save_error is None
    chat.close()


def test_a_rotation_that_was_cut_off_goes_on(
    store: SealedStore, keyring: Keyring, held: dict[str, MemoryBacking], make_engine: MakeEngine
) -> None:
    manager = SessionManager(store, make_engine(), POLICY)
    talk(manager)
    keys = keyring.tenant("default")
    keys.rotate()
    for info in list(store.list_blobs())[:3]:
        assert store.reseal_blob(info.blob)
    assert manager.check().clean
    left = len(list(store.list_blobs())) - 3
    assert reseal(store).num_blobs == left
    assert reseal(store).num_blobs == 0
    assert {number for _, number in sealed_by(held)} == {2}


def test_what_cannot_be_sealed_anew_keeps_the_old_keys(
    store: SealedStore, keyring: Keyring, held: dict[str, MemoryBacking], make_engine: MakeEngine
) -> None:
    manager = SessionManager(store, make_engine(), POLICY)
    session = talk(manager)
    blob = next(manager.manifest(session).blobs()).blob
    (backing,) = held.values()
    whole = backing.blobs[blob]
    backing.blobs[blob] = flip(whole[0], 400), whole[1]
    done = rotate_and_drop(store, keyring.tenant("default"))
    assert len(done.problems) == 2
    assert "kept" in done.problems[-1]
    backing.blobs[blob] = whole
    assert store.get(blob)
    assert rotate_and_drop(store, keyring.tenant("default")).problems == ()
    assert manager.check().clean


@pytest.mark.parametrize("scope", list(Scope))
def test_a_rotation_under_load_loses_nothing(tmp_path: Path, scope: Scope) -> None:
    """Writers put and swap all the time, while keys change and old ones are dropped."""
    keyring = ring(tmp_path / "keys", scope)
    url, stop = str(tmp_path / "store"), threading.Event()
    acknowledged: dict[int, list[BlobId]] = {number: [] for number in range(4)}
    failures: list[BaseException] = []
    open_store(url, keyring=keyring).close()

    def save(number: int) -> None:
        store = open_store(url, keyring=ring(tmp_path / "keys", scope))
        own, value = store.scoped(f"session {number}"), None
        try:
            while not stop.is_set():
                blob = own.put(ROWS, f"{number}: {len(acknowledged[number])} ".encode() * 50)
                assert own.swap(f"session/{number}", value, blob.encode())
                acknowledged[number].append(blob)
                value = blob.encode()
                assert store.get(random.choice(acknowledged[number]))
        except (AssertionError, TenutoError) as error:
            failures.append(error)
        finally:
            store.close()

    threads = [threading.Thread(target=save, args=(number,)) for number in acknowledged]
    for thread in threads:
        thread.start()
    store = open_store(url, keyring=keyring)
    assert isinstance(store, SealedStore)
    turns, deadline = 0, time.monotonic() + 30
    while turns < 4 or (min(map(len, acknowledged.values())) < 10 and time.monotonic() < deadline):
        assert rotate_and_drop(store, keyring.tenant("default")).problems == ()
        turns += 1
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    for number, blobs in acknowledged.items():
        assert store.read(f"session/{number}") == blobs[-1].encode()
        for count, blob in enumerate(blobs):
            assert store.get(blob) == f"{number}: {count} ".encode() * 50
    assert store.check_index() == ()
    store.close()


ROTATES = """
import sys
from pathlib import Path
from sessions.keyring.master import MasterKeys
from sessions.keyring.ring import Keyring
from sessions.rotate import rotate_and_drop
from sessions.stores.open import open_store

keyring = Keyring(Path(sys.argv[2]), MasterKeys([bytes(range(100, 132))]))
store = open_store(sys.argv[1], keyring=keyring)
print("begun", flush=True)
while True:
    rotate_and_drop(store, keyring.tenant("default"))
"""


def test_kill_9_in_a_rotation_loses_nothing(tmp_path: Path) -> None:
    keyring, moments = ring(tmp_path / "keys"), random.Random(3)
    url = str(tmp_path / "store")
    store = open_store(url, keyring=keyring)
    blobs = [store.put(ROWS, b"%d" % number * 5000) for number in range(20)]
    for number in range(20):
        store.swap(f"session/{number}", None, b"%d" % number)
    for _ in range(6):
        command = [sys.executable, "-c", ROTATES, url, str(tmp_path / "keys")]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as rotating:
            assert rotating.stdout is not None
            rotating.stdout.readline()
            time.sleep(moments.uniform(0.0, 0.2))
            rotating.kill()
        assert [store.get(blob) for blob in blobs] == [b"%d" % number * 5000 for number in range(20)]
        assert [store.read(f"session/{number}") for number in range(20)] == [b"%d" % n for n in range(20)]
        assert store.check_index() == ()
    assert rotate(store, keyring.tenant("default")).problems == ()  # type: ignore[arg-type]
    store.close()
