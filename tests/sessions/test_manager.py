"""Laws of `SessionManager`: what each verb changes, what it leaves alone, what it refuses."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.errors import (
    ContextFull,
    FingerprintMismatch,
    LeaseHeld,
    NameRefused,
    SessionAmbiguous,
    SessionExists,
    SessionNotFound,
    StaleSession,
    StoreFull,
)
from engine.runner import Engine
from engine.state import SeqId
from serialization.blobs import BlobClass, blob_class
from serialization.manifest import Message
from sessions.manager import SessionManager
from sessions.names import pin_ref
from sessions.policy import Policy
from sessions.restore import Fallback, Reason
from sessions.session import Session
from sessions.stores.disk import DiskStore
from tests.sessions.conftest import MakeEngine
from tests.tiny import write_tiny


def fed(manager: SessionManager, text: str, name: str | None = None) -> tuple[Session, SeqId]:
    """An open session, saved after `text` was read."""
    engine = manager.engine
    seq = engine.create()
    engine.feed(seq, engine.tokenizer.encode(text))
    session = manager.create(name)
    manager.save(session, seq, ())
    return session, seq


def say(engine: Engine, seq: SeqId, count: int) -> list[int]:
    return [engine.decode([seq])[seq] for _ in range(count)]


def test_a_resumed_session_says_what_the_live_one_says(manager: SessionManager) -> None:
    session, seq = fed(manager, "abc" * 300)
    session.close()
    again = manager.open(session.id)
    resumed, result = manager.resume(again)
    again.close()
    assert (result.reason, result.restored, result.recomputed) == (Reason.EXACT, 900, 0)
    assert say(manager.engine, resumed, 20) == say(manager.engine, seq, 20)


def test_nothing_is_stored_before_the_first_save(manager: SessionManager) -> None:
    manager.create("ghost").close()
    assert manager.list() == []
    manager.create("ghost").close()  # the name is still free


def test_a_small_turn_writes_two_blobs_at_most(manager: SessionManager) -> None:
    """A chunk that closes, the next one, and the manifest: whatever came before."""
    session, seq = fed(manager, "x" * 1500)
    manager.engine.feed(seq, manager.engine.tokenizer.encode("y" * 50))
    manager.engine.decode([seq])
    saved = manager.save(session, seq, ())
    session.close()
    assert saved.blobs_written <= 3
    manifest = manager.manifest(session.id)
    assert manifest.length == 1550


def test_equal_pasts_are_stored_once(manager: SessionManager) -> None:
    past = "the same instructions for all " * 40
    sessions = []
    for name in "abcde":
        session, _ = fed(manager, past + name * 60)
        session.close()
        sessions.append(manager.manifest(session.id))
    whole = {chunk.blobs[0].ref.blob for m in sessions for chunk in m.chunks if chunk.stop <= 1024}
    assert len(whole) == 4
    info = manager.info(sessions[0].session)
    assert info.shared_bytes > 0
    assert info.own_bytes > 0


def test_a_page_is_of_those_begun_last_and_goes_on_behind_them(manager: SessionManager) -> None:
    ids = []
    for number in range(5):
        session, _ = fed(manager, "x" * (20 + number))
        session.close()
        ids.append(session.id)
    manager.pin(ids[4], "kept")
    ids = sorted(ids, reverse=True)
    first = manager.page(2)
    assert [info.id for info in first.sessions] == ids[:2]
    second = manager.page(2, first.after)
    assert [info.id for info in second.sessions] == ids[2:4]
    last = manager.page(2, second.after)
    assert ([info.id for info in last.sessions], last.after) == (ids[4:], None)
    assert manager.page(5).after is None
    whole = {info.id: info for info in manager.list()}
    for info in (*manager.page(9).sessions, *map(manager.brief, ids)):
        assert replace(whole[info.id], own_bytes=None, shared_bytes=None) == info


def test_bytes_of_a_session_are_its_own_until_another_needs_them(manager: SessionManager) -> None:
    session, _ = fed(manager, "x" * 600)
    session.close()
    manager.pin(session.id, "kept")
    alone = manager.info(session.id)
    stored = sum(info.nbytes for info in manager.store.list_blobs())
    assert (alone.own_bytes, alone.shared_bytes) == (stored, 0)
    manager.fork(session.id)
    with_fork = manager.info(session.id)
    assert with_fork.own_bytes is not None
    assert 0 < with_fork.own_bytes < stored
    assert (with_fork.own_bytes or 0) + (with_fork.shared_bytes or 0) == stored


def test_usage_is_what_lies_on_disk(manager: SessionManager, store: DiskStore, tmp_path: Path) -> None:
    for n in range(3):
        fed(manager, "z" * (300 + n))[0].close()
    usage = manager.usage()
    on_disk = sum(path.stat().st_size for path in (tmp_path / "store").rglob("*") if path.is_file())
    assert usage.total == store.usage()
    assert abs(on_disk - usage.total) <= 64 * 1024  # files of the store itself, beside the tenant's
    rows = sum(i.nbytes for i in store.list_blobs() if blob_class(i.blob) is not BlobClass.MANIFEST)
    assert usage.rows_bytes + usage.superseded_bytes >= rows


def test_a_fork_goes_its_own_way(manager: SessionManager) -> None:
    session, seq = fed(manager, "once upon a time " * 30)
    fork = manager.fork(session.id, "other")
    assert fork.parent == session.id
    manager.engine.feed(seq, manager.engine.tokenizer.encode("the end"))
    manager.save(session, seq, ())
    session.close()
    assert manager.info("other").length == 510
    assert manager.info(session.id).length == 516  # "th" is one token


def test_a_fork_of_an_earlier_length_resumes_there(manager: SessionManager) -> None:
    session, seq = fed(manager, "abcdefgh" * 70)
    session.close()
    fork = manager.open(manager.fork(session.id, length=300).id)
    resumed, result = manager.resume(fork)
    fork.close()
    assert result.restored == 300
    engine = manager.engine
    live = engine.fork(seq)
    engine.rewind(live, 300)
    assert say(engine, resumed, 12) == say(engine, live, 12)


def test_rewind_takes_back_turns_and_keeps_what_was_before(manager: SessionManager) -> None:
    engine = manager.engine
    session, seq = fed(manager, "hello")
    messages = [Message("user", "hello", 0, 5)]
    for turn in range(3):
        start = engine.length(seq)
        engine.feed(seq, engine.tokenizer.encode(f"turn {turn} "))
        messages.append(Message("user", f"turn {turn}", start, engine.length(seq)))
        manager.save(session, seq, messages)
    session.close()
    info = manager.rewind(session.id, 2)
    manifest = manager.manifest(session.id)
    assert [m.text for m in manifest.messages] == ["hello", "turn 0"]
    assert info.generation == 5
    assert info.length == manifest.messages[-1].stop - 1  # the last id is pending


def test_two_writers_never_merge_in_silence(manager: SessionManager) -> None:
    session, seq = fed(manager, "mine")
    with pytest.raises(LeaseHeld, match="pid") as caught:
        manager.open(session.id)
    assert caught.value.details["until"]
    with pytest.raises(StaleSession):
        manager.save(session, seq, (), expected=0)
    session.close()
    manager.open(session.id).close()


def test_names_are_unique_and_move_with_their_session(manager: SessionManager) -> None:
    fed(manager, "one", "first")[0].close()
    with pytest.raises(SessionExists):
        manager.create("first")
    manager.rename("first", "second")
    assert manager.info("second").name == "second"
    with pytest.raises(SessionNotFound):
        manager.info("first")
    fed(manager, "two", "first")[0].close()


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden", "x" * 65, "nul\0", "-flag", "ünï"])
def test_names_that_could_be_anything_else_are_refused(manager: SessionManager, name: str) -> None:
    with pytest.raises(NameRefused):
        manager.create(name)
    with pytest.raises(NameRefused):
        manager.open(name)


def test_the_start_of_an_id_is_enough_while_it_is_one(manager: SessionManager) -> None:
    a, b = fed(manager, "one")[0], fed(manager, "two")[0]
    a.close(), b.close()
    assert manager.info(a.id[:25].lower()).id == a.id or a.id[:25] == b.id[:25]
    with pytest.raises(SessionAmbiguous):
        manager.info(a.id[:2])
    with pytest.raises(SessionNotFound):
        manager.info("ZZZZ")


def test_a_deleted_session_is_gone_also_after_a_rebuild(manager: SessionManager) -> None:
    fed(manager, "keep", "keep")[0].close()
    fed(manager, "drop", "drop")[0].close()
    manager.delete("drop")
    from sessions.check import rebuild_refs

    found = rebuild_refs(manager.store)
    manager.store.rebuild(found.refs)
    assert not found.lost
    assert [info.name for info in manager.list()] == ["keep"]


def test_a_pin_stays_where_it_was_set(manager: SessionManager) -> None:
    session, seq = fed(manager, "until here")
    pin = manager.pin(session.id, "here")
    manager.engine.feed(seq, manager.engine.tokenizer.encode(" and beyond"))
    manager.save(session, seq, ())
    session.close()
    assert pin.length == 10
    loaded = manager.load("here")
    assert loaded.length == 10
    assert loaded.parent == session.id
    with pytest.raises(SessionExists):
        manager.pin(session.id, "here")
    manager.unpin("here")
    assert manager.pins() == []


def test_a_pin_that_is_set_anew_is_there_all_the_time(
    manager: SessionManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, seq = fed(manager, "until here")
    manager.repin(session.id, "here")
    manager.engine.feed(seq, manager.engine.tokenizer.encode(" and beyond"))
    manager.save(session, seq, ())
    swap = manager.store.swap

    def full(name: str, old: bytes | None, new: bytes | None, guard: Any = None) -> bool:
        if name == pin_ref("here"):
            raise StoreFull("no room")
        return swap(name, old, new, guard)

    with monkeypatch.context() as patch:
        patch.setattr(manager.store, "swap", full)
        with pytest.raises(StoreFull):
            manager.repin(session.id, "here")
    assert [(pin.name, pin.length) for pin in manager.pins()] == [("here", 10)]
    manager.repin(session.id, "here")
    manager.repin(session.id, "here")
    session.close()
    assert [pin.length for pin in manager.pins()] == [manager.info(session.id).length]
    assert manager.load("here").length == manager.info(session.id).length
    assert manager.check().clean


def test_an_archive_carries_the_session_to_another_store(
    manager: SessionManager, engine: Engine, tmp_path: Path
) -> None:
    session, seq = fed(manager, "take me along " * 40)
    session.close()
    box = io.BytesIO()
    written = manager.export(session.id, box)
    assert written.nbytes == len(box.getvalue())
    there = SessionManager(DiskStore(tmp_path / "there", "default"), engine)
    box.seek(0)
    info = there.import_(box, "arrived")
    opened = there.open("arrived")
    resumed, result = there.resume(opened)
    opened.close()
    assert info.parent == session.id
    assert result.reason is Reason.EXACT
    assert say(engine, resumed, 10) == say(engine, seq, 10)


def test_another_model_is_refused_by_the_field_that_differs(
    manager: SessionManager, store: DiskStore, make_engine: MakeEngine, tmp_path: Path
) -> None:
    session, _ = fed(manager, "hello " * 60)
    session.close()
    others = {
        "weights": make_engine(write_tiny(tmp_path / "other.gguf", seed=1)),
        "rope": make_engine(write_tiny(tmp_path / "rope.gguf", rope_base=20000.0)),
        "type_k": make_engine(type_k="q8_0"),
        "type_v": make_engine(type_v="f16"),
    }
    for field, other in others.items():
        elsewhere = SessionManager(store, other)
        opened = elsewhere.open(session.id)
        with pytest.raises(FingerprintMismatch) as caught:
            elsewhere.resume(opened)
        assert any(name.startswith(field) for name in caught.value.details["fields"])  # type: ignore[attr-defined]
        seq, result = elsewhere.resume(opened, Fallback.RECOMPUTE)
        assert (result.reason, result.restored, result.recomputed) == (Reason.FINGERPRINT, 0, 360)
        fresh = other.create()
        other.feed(fresh, other.tokenizer.encode("hello " * 60))
        other.close(seq)
        opened.close()


def test_another_build_is_believed_after_its_canary_alone(manager: SessionManager, store: DiskStore) -> None:
    session, _ = fed(manager, "hello " * 60)
    session.close()
    engine = manager.engine
    making = {**engine.fingerprint.making, "torch": "9.9.9"}
    engine.fingerprint = replace(engine.fingerprint, making=making)
    opened = manager.open(session.id)
    _, result = manager.resume(opened)
    assert result.reason is Reason.COMPATIBLE
    assert "torch" in result.detail
    strict = SessionManager(store, engine, Policy(drift=0.0))
    entry = opened.entry
    assert entry is not None
    assert entry.manifest.canary is not None
    logits = tuple(x + 1 for x in entry.manifest.canary.logits)
    forged = replace(entry.manifest, canary=replace(entry.manifest.canary, logits=logits))
    opened.entry = replace(entry, manifest=forged)
    with pytest.raises(FingerprintMismatch, match="canary"):
        strict.resume(opened)
    seq, result = strict.resume(opened, Fallback.RECOMPUTE)
    assert (result.restored, result.recomputed) == (0, engine.length(seq))
    opened.close()


def test_rows_that_a_canary_refused_are_no_prefix_either(
    manager: SessionManager, make_engine: MakeEngine
) -> None:
    session, _ = fed(manager, "hello " * 60)
    session.close()
    engine = make_engine()
    engine.fingerprint = replace(engine.fingerprint, making={"torch": "9.9.9"})
    other = SessionManager(manager.store, engine, Policy(drift=-1.0))
    opened = other.open(session.id)
    seq, result = other.resume(opened, Fallback.RECOMPUTE)
    assert result.reason is Reason.FINGERPRINT
    assert engine.known_prefix(engine.tokens(seq)) == engine.length(seq) - 1, "its own rows, nobody else's"
    engine.rewind(seq, 0)
    assert engine.known_prefix(opened.stored().manifest.tokens) == 0
    opened.close()


@pytest.mark.parametrize("length", [256, 300, 512, 515])
def test_the_canary_of_a_window_can_be_asked(
    store: DiskStore, make_engine: MakeEngine, windowed_path: Path, length: int
) -> None:
    """Also at a chunk's border, where a resume reads no more rows than it needs."""
    manager = SessionManager(store, make_engine(windowed_path))
    session, _ = fed(manager, "w" * length)
    session.close()
    engine = make_engine(windowed_path)
    engine.fingerprint = replace(engine.fingerprint, making={"torch": "9.9.9"})
    elsewhere = SessionManager(store, engine)
    opened = elsewhere.open(session.id)
    _, result = elsewhere.resume(opened)
    opened.close()
    assert (result.reason, result.restored) == (Reason.COMPATIBLE, length)


@pytest.mark.parametrize(("n_keep", "goes_on"), [(8, False), (0, True)])
def test_a_resumed_context_is_not_shifted_to_where_rows_are_needed_that_were_not_saved(
    store: DiskStore, make_engine: MakeEngine, windowed_path: Path, n_keep: int, goes_on: bool
) -> None:
    settings = {"full_windows": True, "overflow": "shift", "n_ctx": 100, "n_keep": n_keep, "n_discard": 90}
    manager = SessionManager(store, make_engine(windowed_path, **settings))
    session, live = fed(manager, "w" * 100)
    length = manager.engine.length(live)
    session.close()
    elsewhere = SessionManager(store, make_engine(windowed_path, **settings))
    engine, opened = elsewhere.engine, elsewhere.open(session.id)
    seq, _ = elsewhere.resume(opened)
    work = tuple(range(101 - length))
    if goes_on:
        engine.advance({seq: work})
        manager.engine.advance({live: work})
        assert engine.logits(seq).equal(manager.engine.logits(live))
        elsewhere.save(opened, seq, ())
        assert elsewhere.resume(opened)[1].recomputed == 0
    else:
        with pytest.raises(ContextFull, match="window rows are gone"):
            engine.advance({seq: work})
        assert engine.length(seq) == length
        engine.set_pending(seq, 5)
        assert [piece.finish for piece in engine.generate(seq)][-1] == "context"
    opened.close()


def test_released_rows_are_read_again_and_it_is_said(manager: SessionManager) -> None:
    session, seq = fed(manager, "hello " * 60)
    session.close()
    manager.release_rows(session.id)
    opened = manager.open(session.id)
    resumed, result = manager.resume(opened)
    opened.close()
    assert (result.reason, result.restored, result.recomputed) == (Reason.EXPIRED, 0, 360)
    assert say(manager.engine, resumed, 8) == say(manager.engine, seq, 8)


def test_recomputed_rows_never_mix_with_stored_ones(manager: SessionManager) -> None:
    """What was read again may differ in its last bits: the next save writes all of it anew."""
    session, seq = fed(manager, "hello " * 100)
    manager.engine.rewind(seq, 10)
    session.cut(10)
    manager.engine.feed(seq, manager.engine.tokenizer.encode("hello " * 100)[10:])
    saved = manager.save(session, seq, ())
    session.close()
    assert saved.blobs_written >= 3


def test_a_windowed_session_shares_and_resumes(
    store: DiskStore, make_engine: MakeEngine, windowed_path: Path
) -> None:
    engine = make_engine(windowed_path)
    manager = SessionManager(store, engine)
    session, seq = fed(manager, "long ago and far away " * 50)
    session.close()
    again = manager.open(session.id)
    resumed, result = manager.resume(again)
    again.close()
    assert result.recomputed == 0
    assert say(engine, resumed, 40) == say(engine, seq, 40)
