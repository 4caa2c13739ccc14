"""Nothing damaged is believed: each damage has its error, and repair keeps the text."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine.errors import (
    BlobMissing,
    Corrupt,
    IndexDamaged,
    LimitExceeded,
    StateError,
    UnknownFeature,
    UnknownVersion,
)
from engine.runner import Engine
from engine.state import SeqId
from serialization.blobs import BlobClass, BlobId, blob_class
from sessions.conversation import Conversation, Reply
from sessions.manager import SessionManager
from sessions.names import session_ref
from sessions.policy import Policy
from sessions.restore import Fallback, Reason
from sessions.stores.disk import DiskStore
from tests.faults import flip
from tests.serialization.spelling import record_of, written

SHORT = Reply(max_tokens=8)


@pytest.fixture
def chat(manager: SessionManager) -> Conversation:
    chat = Conversation.new(manager, name="chat")
    for turn in ("first " * 60, "second " * 40):
        for _ in chat.say(turn, SHORT):
            pass
    chat.close()
    return chat


def files(store: DiskStore, root: Path) -> dict[BlobId, Path]:
    by_digest = {info.blob.rpartition("-")[2]: info.blob for info in store.list_blobs()}
    found: dict[BlobId, Path] = {}
    for path in root.rglob("*"):
        for digest, blob in by_digest.items():
            if path.is_file() and digest in path.name:
                found[blob] = path
    assert len(found) == len(by_digest)
    return found


def spoil(path: Path, data: bytes) -> None:
    if path.exists():
        path.chmod(0o600)
    path.write_bytes(data)


def current(manager: SessionManager) -> set[BlobId]:
    return {ref.blob for ref in manager.manifest("chat").blobs()}


def resume_fails(manager: SessionManager, kind: type[StateError]) -> None:
    """The session is refused, the engine is as it was, and works."""
    engine = manager.engine
    session = manager.open("chat")
    try:
        with pytest.raises(kind) as caught:
            manager.resume(session)
    finally:
        session.close()
    assert "\n" not in str(caught.value)
    assert_fresh(engine)


def assert_fresh(engine: Engine) -> None:
    seqs: list[SeqId] = []
    for _ in range(engine.config.num_seqs):  # every sequence is free again
        seqs.append(engine.create())
    tokens = engine.tokenizer.encode("a fresh run")
    said = []
    for seq in seqs[:2]:
        engine.feed(seq, tokens)
        said.append([engine.decode([seq])[seq] for _ in range(4)])
    assert said[0] == said[1]
    for seq in seqs:
        engine.close(seq)


def test_any_flipped_byte_of_rows_is_refused(
    manager: SessionManager, chat: Conversation, store: DiskStore, tmp_path: Path
) -> None:
    paths = files(store, tmp_path / "store")
    for blob in current(manager):
        good = paths[blob].read_bytes()
        for at in [*range(0, 200, 7), *range(200, len(good), len(good) // 40), len(good) - 1]:
            spoil(paths[blob], flip(good, at * 8 + at % 8))
            resume_fails(manager, Corrupt)
        spoil(paths[blob], good)
    session = manager.open("chat")
    assert manager.resume(session)[1].reason is Reason.EXACT
    session.close()


def damages(good: bytes) -> Iterator[bytes]:
    yield b""
    for length in range(1, len(good), max(1, len(good) // 60)):
        yield good[:length]
    yield good + b"\0"
    yield good + good


def test_truncated_and_extended_blobs_are_refused(
    manager: SessionManager, chat: Conversation, store: DiskStore, tmp_path: Path
) -> None:
    paths = files(store, tmp_path / "store")
    for blob in current(manager):
        good = paths[blob].read_bytes()
        for bad in damages(good):
            spoil(paths[blob], bad)
            resume_fails(manager, Corrupt)
        spoil(paths[blob], good)


def test_a_damaged_manifest_is_refused(
    manager: SessionManager, chat: Conversation, store: DiskStore, tmp_path: Path
) -> None:
    value = store.read(session_ref(chat.session.id))
    assert value is not None
    path = files(store, tmp_path / "store")[BlobId(value.decode())]
    good = path.read_bytes()
    for at in range(0, len(good), 11):
        spoil(path, flip(good, at * 8))
        with pytest.raises(Corrupt):
            manager.open("chat")
    for bad in damages(good):
        spoil(path, bad)
        with pytest.raises(Corrupt):
            manager.open("chat")
    assert_fresh(manager.engine)


@pytest.mark.parametrize("what", ["version", "feature", "tokens", "garbage"])
def test_a_manifest_that_is_whole_but_wrong_is_refused(
    manager: SessionManager, chat: Conversation, store: DiskStore, what: str
) -> None:
    """Its digest is right, so only reading it can tell."""
    ref = session_ref(chat.session.id)
    old = store.read(ref)
    assert old is not None
    data = bytes(store.get(BlobId(old.decode())))
    if what == "version":
        forged, kind = data[:7] + b"\x63" + data[8:], UnknownVersion
    elif what == "feature":
        forged, kind = written({**record_of(data), "features": ["time-travel"]}), UnknownFeature
    elif what == "tokens":
        record = record_of(data)
        record["chunks"][0][1] = 2**40
        forged, kind = written(record), LimitExceeded
    else:
        forged, kind = os.urandom(200), StateError  # type: ignore[assignment]
    blob = store.put(BlobClass.MANIFEST, forged)
    assert store.swap(ref, old, blob.encode())
    with pytest.raises(kind):
        manager.open("chat")
    assert_fresh(manager.engine)


def test_a_link_in_place_of_a_blob_is_not_followed(
    manager: SessionManager, chat: Conversation, store: DiskStore, tmp_path: Path
) -> None:
    paths = files(store, tmp_path / "store")
    path = paths[next(iter(current(manager)))]
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    resume_fails(manager, StateError)


def test_a_blob_that_vanishes_is_missing_and_the_text_is_not(
    manager: SessionManager, chat: Conversation, store: DiskStore, tmp_path: Path
) -> None:
    paths = files(store, tmp_path / "store")
    paths[next(iter(current(manager)))].unlink()
    resume_fails(manager, BlobMissing)
    again = Conversation.open(manager, "chat", Fallback.RECOMPUTE)
    assert again.restored is not None
    assert again.restored.reason is Reason.MISSING
    assert again.restored.recomputed == chat.messages[-1].stop - 1
    assert [m.text for m in again.messages] == [m.text for m in chat.messages]
    for _ in again.say("on we go", SHORT):
        pass
    again.close()
    assert manager.check().clean


def test_repair_gives_up_damaged_rows_and_keeps_the_rest(
    manager: SessionManager, chat: Conversation, store: DiskStore, tmp_path: Path
) -> None:
    manifest = manager.manifest("chat")
    second = manifest.chunks[1].blobs[0].ref.blob
    path = files(store, tmp_path / "store")[second]
    spoil(path, flip(path.read_bytes(), 777))
    report = manager.check()
    assert [problem.kind for problem in report.problems] == ["corrupt"]
    assert not manager.check().clean, "check changes nothing"
    repaired = manager.repair()
    assert repaired.clean
    assert "256 tokens" in repaired.repaired[0]
    again = Conversation.open(manager, "chat")
    assert again.restored is not None
    assert (again.restored.reason, again.restored.restored) == (Reason.NO_CHECKPOINT, 256)
    for _ in again.say("on", SHORT):
        pass
    again.close()
    assert manager.check().clean
    assert second not in current(manager) or store.get(second)


def test_a_damaged_index_is_found_and_rebuilt_from_the_manifests(
    manager: SessionManager, chat: Conversation, store: DiskStore, engine: Engine, tmp_path: Path
) -> None:
    manager.pin("chat", "kept")
    manager.fork("chat", "branch")
    before = {(info.id, info.name, info.generation, info.pins) for info in manager.list()}
    store.close()
    (index,) = (p for p in (tmp_path / "store").rglob("*") if p.suffix in (".sqlite", ".db", ".sqlite3"))
    for side in index.parent.glob(index.name + "-*"):
        side.unlink()
    good = index.read_bytes()
    found = 0
    used = [at for at in range(len(good)) if good[at]]
    for at in used[:: len(used) // 40]:
        spoil(index, flip(good, at * 8 + 3))
        damaged = DiskStore(tmp_path / "store", "default")
        reader = SessionManager(damaged, engine, Policy(lease=5, grace=10))
        if reader.check().clean:  # a byte that holds nothing
            assert {(i.id, i.name, i.generation, i.pins) for i in reader.list()} == before
            damaged.close()
            continue
        found += 1
        report = reader.repair()
        assert report.clean, report.problems
        assert {(i.id, i.name, i.generation, i.pins) for i in reader.list()} == before
        session = reader.open("chat")
        seq, result = reader.resume(session)
        assert result.reason is Reason.EXACT
        session.close()
        engine.close(seq)
        damaged.close()
        for side in index.parent.glob(index.name + "*"):
            side.unlink()
    assert found > 10


def test_a_wiped_index_is_an_error_of_its_own(
    manager: SessionManager, chat: Conversation, store: DiskStore, tmp_path: Path
) -> None:
    store.close()
    (index,) = (p for p in (tmp_path / "store").rglob("*") if p.suffix in (".sqlite", ".db", ".sqlite3"))
    spoil(index, b"this is no database at all" * 40)
    damaged = SessionManager(DiskStore(tmp_path / "store", "default"), manager.engine)
    with pytest.raises(IndexDamaged, match="repair"):
        damaged.list()
    assert not damaged.check().clean
    assert damaged.repair().clean
    assert [info.name for info in damaged.list()] == ["chat"]


def test_only_rows_are_ever_forgotten_by_gc(manager: SessionManager, chat: Conversation) -> None:
    manager.policy = replace(manager.policy, budget=0)
    plan = manager.plan_gc()
    assert tuple(plan.released) == (chat.session.id,)
    manager.collect(plan)
    manifest = manager.manifest("chat")
    assert [m.text for m in manifest.messages] == [m.text for m in chat.messages]
    assert not [ref for ref in manifest.blobs() if blob_class(ref.blob) is BlobClass.ROWS]


@pytest.mark.parametrize("fault", [Corrupt, BlobMissing])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_what_is_wrong_with_one_chunk_of_many_leaves_nothing_of_the_others(
    manager: SessionManager, store: DiskStore, tmp_path: Path, at: int, fault: type[StateError]
) -> None:
    """Those before it are in place by then."""
    engine, tokens = manager.engine, [number % 200 for number in range(700)]
    seq, session = engine.create(), manager.create("chat")
    engine.feed(seq, tokens)
    engine.choose(seq)
    manager.save(session, seq, ())
    following = [engine.decode([seq])[seq] for _ in range(5)]
    session.close()
    engine.rewind(seq, 0)
    engine.close(seq)
    path = files(store, tmp_path / "store")[manager.manifest("chat").chunks[at].blobs[0].ref.blob]
    good = path.read_bytes()
    if fault is Corrupt:
        spoil(path, flip(good, 8 * len(good) // 2))
    else:
        path.unlink()
    resume_fails(manager, fault)
    spoil(path, good)
    session = manager.open("chat")
    again, result = manager.resume(session)
    assert (result.reason, result.restored) == (Reason.EXACT, 700)
    assert [engine.decode([again])[again] for _ in range(5)] == following
    session.close()
