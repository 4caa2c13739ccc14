"""What a newer build stored is refused by its name and left as it is, by every verb that deletes or mends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from engine.errors import BlobMissing, Corrupt, StateError, UnknownFeature, UnknownVersion
from engine.runner import Engine
from serialization.blobs import BlobClass, BlobId, Store
from serialization.renaming import renamed
from sessions.conversation import Conversation, Reply
from sessions.manager import SessionManager
from sessions.names import session_ref
from sessions.policy import Policy
from sessions.restore import Reason
from sessions.stores.disk import DiskStore
from sessions.stores.memory import MemoryStore
from tests.serialization.spelling import record_of, written
from tests.sessions.clock import Clock

NEWER = pytest.mark.parametrize(
    ("how", "error", "named"),
    [("version", UnknownVersion, "version 9"), ("feature", UnknownFeature, "'zebra'")],
    ids=["version", "feature"],
)
Forge = Callable[[bytes], bytes]
GRACE = 100.0
#: Whatever is old enough goes: sessions, rows, and what is over the budget.
GREEDY = Policy(lease=10, grace=GRACE, session_ttl=1.0, rows_ttl=1.0, budget=0)


@pytest.fixture
def clock() -> Clock:
    return Clock(2_000_000_000.0)


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    return MemoryStore(clock=clock)


@pytest.fixture
def manager(store: Store, engine: Engine) -> SessionManager:
    return SessionManager(store, engine, Policy(lease=10, grace=GRACE))


def talked(manager: SessionManager, name: str) -> str:
    """A session of two turns."""
    chat = Conversation.new(manager, name)
    for text in ("tell me a story", "and then?"):
        assert list(chat.say(text, Reply(max_tokens=4)))
        assert chat.save_error is None
    chat.close()
    return chat.session.id


@pytest.fixture
def chat(manager: SessionManager) -> str:
    """A session that the newer build is going to take over, beside a good one."""
    talked(manager, "good")
    return talked(manager, "chat")


def newer(data: bytes, how: str) -> bytes:
    """The manifest as a build to come may write it."""
    if how == "version":
        return data[:7] + b"\x09" + data[8:]
    return written({**record_of(data), "features": ["zebra"], "stripes": [1, 2]})


def taken_over(store: Store, session: str, how: str) -> tuple[BlobId, BlobId]:
    """Let the session's ref name such a manifest. Returns the manifest that it named, and that one."""
    ref = session_ref(session)
    old = store.read(ref)
    assert old is not None
    blob = store.put(BlobClass.MANIFEST, newer(bytes(store.get(BlobId(old.decode()))), how))
    assert store.swap(ref, old, blob.encode())
    return BlobId(old.decode()), blob


def content(store: Store) -> tuple[Mapping[str, bytes], set[BlobId]]:
    refs = {ref: value for ref, value in store.list_refs("") if not ref.startswith(("lease/", "used/"))}
    return refs, {info.blob for info in store.list_blobs()}


@NEWER
def test_it_is_refused_by_its_name_and_does_not_hide_the_others(
    manager: SessionManager, store: Store, chat: str, how: str, error: type[StateError], named: str
) -> None:
    taken_over(store, chat, how)
    for verb in (manager.open, manager.info, manager.fork, manager.rewind, manager.delete, manager.manifest):
        with pytest.raises(error, match=named):
            verb("chat")
    assert [info.name for info in manager.list()] == ["good"]
    assert [info.name for info in manager.page(9, None).sessions] == ["good"]
    ((ref, why),) = manager.unreadable().items()
    assert ref == session_ref(chat)
    assert named in str(why)


@NEWER
def test_check_tells_it_apart_from_damage_and_a_repair_changes_nothing(
    manager: SessionManager, store: Store, chat: str, how: str, error: type[StateError], named: str
) -> None:
    taken_over(store, chat, how)
    before = content(store)
    for report in (manager.check(), manager.repair()):
        (problem,) = report.problems
        assert (problem.kind, problem.where) == ("newer", session_ref(chat))
        assert named in problem.message
        assert report.repaired == ()
    assert content(store) == before


@NEWER
def test_gc_deletes_nothing_while_a_ref_names_it(
    manager: SessionManager, clock: Clock, chat: str, how: str, error: type[StateError], named: str
) -> None:
    taken_over(manager.store, chat, how)
    clock.now += 2 * GRACE
    before = content(manager.store)
    greedy = SessionManager(manager.store, manager.engine, GREEDY)
    with pytest.raises(error, match=named):
        greedy.collect(greedy.plan_gc())
    assert content(manager.store) == before


@NEWER
def test_gc_deletes_nothing_where_it_comes_after_the_plan(
    manager: SessionManager, clock: Clock, chat: str, how: str, error: type[StateError], named: str
) -> None:
    clock.now += 2 * GRACE
    plan = manager.plan_gc()
    assert plan.blobs
    taken_over(manager.store, chat, how)
    before = content(manager.store)
    with pytest.raises(error, match=named):
        manager.collect(plan)
    assert content(manager.store) == before


@NEWER
def test_the_newer_build_finds_all_of_it_again(
    manager: SessionManager, clock: Clock, chat: str, how: str, error: type[StateError], named: str
) -> None:
    manifest, store = manager.manifest("chat"), manager.store
    old, blob = taken_over(store, chat, how)
    clock.now += 2 * GRACE
    manager.repair()
    with pytest.raises(error, match=named):
        manager.plan_gc()
    assert store.get(blob) == newer(bytes(store.get(old)), how)
    assert store.swap(session_ref(chat), blob.encode(), old.encode())
    session = manager.open("chat")
    seq, result = manager.resume(session)
    assert (result.restored, result.reason) == (manifest.length, Reason.EXACT)
    manager.engine.close(seq)
    session.close()
    assert manager.check().clean


@NEWER
def test_its_manifest_is_never_collected_though_no_ref_names_it(
    manager: SessionManager, clock: Clock, chat: str, how: str, error: type[StateError], named: str
) -> None:
    """What can be read, is as old and is not needed either goes."""
    store = manager.store
    old, blob = taken_over(store, chat, how)
    assert store.swap(session_ref(chat), blob.encode(), None)
    clock.now += 2 * GRACE
    assert manager.collect(manager.plan_gc()).num_blobs > 1
    assert store.has([blob]) == (True,)
    with pytest.raises(BlobMissing):
        store.get(old)
    assert manager.check().clean


@NEWER
def test_an_index_is_not_built_anew_without_it(
    engine: Engine, tmp_path: Path, how: str, error: type[StateError], named: str
) -> None:
    manager = SessionManager(DiskStore(tmp_path / "store"), engine, Policy(lease=5, grace=10))
    chat = talked(manager, "chat")
    taken_over(manager.store, chat, how)
    manager.store.close()
    (index,) = (tmp_path / "store").rglob("*.sqlite")
    for path in index.parent.glob(f"{index.name}*"):
        path.write_bytes(b"damaged beyond repair")
    damaged = SessionManager(DiskStore(tmp_path / "store"), engine, Policy(lease=5, grace=10))
    before = {path: path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()}
    with pytest.raises(error, match=f"newer tenuto wrote 1 of the manifests .*{named}"):
        damaged.repair()
    damaged.store.close()
    after = {path: path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()}
    assert after == before


@NEWER
def test_a_damaged_session_does_not_go_back_to_a_turn_before_a_newer_one(
    manager: SessionManager, chat: str, how: str, error: type[StateError], named: str
) -> None:
    """Its last sound turn may be the one that cannot be read."""
    store = manager.store
    _, blob = taken_over(store, chat, how)
    junk = store.put(BlobClass.MANIFEST, b"junk")
    assert store.swap(session_ref(chat), blob.encode(), junk.encode())
    before = content(store)
    report = manager.repair()
    assert [problem.kind for problem in report.problems] == ["manifest"]
    assert "left alone" in report.repaired[0]
    assert named in report.repaired[0]
    assert content(store) == before
    with pytest.raises(Corrupt):
        manager.open("chat")


@NEWER
def test_a_damaged_neighbour_is_mended_all_the_same(
    manager: SessionManager, chat: str, how: str, error: type[StateError], named: str
) -> None:
    store = manager.store
    _, blob = taken_over(store, chat, how)
    for ref in manager.manifest("good").blobs():
        assert store.delete_blob(ref.blob, 0)
    report = manager.repair()
    assert [problem.kind for problem in report.problems] == ["newer"]
    assert any("given up" in line for line in report.repaired)
    assert store.read(session_ref(chat)) == blob.encode()


@pytest.mark.parametrize(
    "forge",
    [lambda data: data[:7] + b"\x09" + data[8:], lambda data: data.replace(b"float-split", b"float-zebra")],
    ids=["version", "codec"],
)
def test_rows_of_a_newer_build_are_not_given_up(manager: SessionManager, chat: str, forge: Forge) -> None:
    """The manifest can be read, its blobs cannot."""
    store, manifest = manager.store, manager.manifest("chat")
    blob = next(ref for ref in manifest.blobs() if ref.blob.startswith("rows-"))
    data = forge(bytes(store.get(blob.blob)))
    assert len(data) == blob.nbytes
    forged = renamed(manifest, {blob.blob: store.put(BlobClass.ROWS, data)})
    old, new = store.read(session_ref(chat)), store.put(BlobClass.MANIFEST, forged.encode())
    assert store.swap(session_ref(chat), old, new.encode())
    before = content(store)
    report = manager.repair()
    assert [problem.kind for problem in report.problems] == ["newer"]
    assert report.repaired == ()
    assert content(store) == before
