"""What one process does between two steps of another: names, leases, gc, repair, and damaged neighbours."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine.errors import (
    Corrupt,
    LeaseLost,
    NameRefused,
    SessionExists,
    SessionNotFound,
    StaleSession,
    StoreUnavailable,
    TenutoError,
)
from engine.runner import Engine
from engine.state import Provenance
from serialization.archive import write_archive
from serialization.blobs import BlobClass
from serialization.manifest import ManifestKind
from sessions import names
from sessions.check import rebuild_refs
from sessions.conversation import Conversation, Reply
from sessions.lease import acquire
from sessions.manager import SessionManager
from sessions.policy import Policy
from sessions.stores.disk import DiskStore
from sessions.stores.memory import MemoryStore
from tests.faults import FaultyStore

SHORT = Reply(max_tokens=8)


def say(chat: Conversation, text: str) -> TenutoError | None:
    """Says it; returns what kept the turn from being saved."""
    for _ in chat.say(text, SHORT):
        pass
    return chat.save_error


def talked(manager: SessionManager, name: str | None = None, text: str = "hello") -> str:
    chat = Conversation.new(manager, name)
    say(chat, text)
    assert chat.save_error is None
    chat.close()
    return chat.session.id


class Interleaved(MemoryStore):
    """A store that calls `between` once, just before it lists refs whose names start with `at`."""

    at = ""

    def between(self) -> None:
        pass

    def list_refs(self, prefix: str) -> Iterator[tuple[str, bytes]]:
        if self.at and prefix == self.at:
            self.at = ""
            self.between()
        return super().list_refs(prefix)


class LostAnswers(MemoryStore):
    """Swaps take place, and their answers are lost while `lost`."""

    lost = False

    def swap(
        self, name: str, old: bytes | None, new: bytes | None, guard: tuple[str, bytes] | None = None
    ) -> bool:
        done = super().swap(name, old, new, guard)
        if self.lost:
            raise StoreUnavailable("no answer")
        return done


def test_a_renewal_whose_answer_was_lost_does_not_lose_the_lease() -> None:
    store = LostAnswers()
    lease = acquire(store, "X", "me")
    store.lost = True
    with pytest.raises(StoreUnavailable):
        lease.renew()
    store.lost = False
    lease.renew()
    store.lost = True
    with pytest.raises(StoreUnavailable):
        lease.renew()
    store.lost = False
    assert lease.swap("session/X", None, b"turn")
    assert not lease.swap("session/X", None, b"another")
    lease.close()


def test_a_chat_whose_lease_was_taken_and_given_back_is_saved_if_nobody_wrote(
    manager: SessionManager, store: DiskStore, engine: Engine
) -> None:
    chat = Conversation.new(manager)
    say(chat, "one")
    _, held = chat.session.lease.guard
    assert store.swap(f"lease/{chat.session.id}", held, None)  # it ended while the machine slept
    other = SessionManager(store, engine, holder="other").open(chat.session.id)
    assert isinstance(say(chat, "two"), LeaseLost)
    other.close()
    assert say(chat, "three") is None
    assert len(manager.manifest(chat.session.id).messages) == 6
    _, held = chat.session.lease.guard
    assert store.swap(f"lease/{chat.session.id}", held, None)
    SessionManager(store, engine, holder="other").rewind(chat.session.id)
    assert isinstance(say(chat, "four"), StaleSession)


def unsure(engine: Engine) -> tuple[LostAnswers, Conversation]:
    """A chat whose second turn was committed, though nobody was told; and then its lease ended."""
    store = LostAnswers()
    chat = Conversation.new(SessionManager(store, engine))
    assert say(chat, "one") is None
    store.lost = True
    assert isinstance(say(chat, "two"), StoreUnavailable)
    store.lost = False
    held = store.read(f"lease/{chat.session.id}")
    assert store.swap(f"lease/{chat.session.id}", held, None)
    return store, chat


def test_a_turn_whose_answer_was_lost_is_committed_once_also_where_its_lease_ended(engine: Engine) -> None:
    store, chat = unsure(engine)
    num_blobs = len(list(store.list_blobs()))
    saved = chat.save()
    assert (saved.generation, saved.blobs_written, saved.bytes_written) == (2, 0, 0)
    assert len(list(store.list_blobs())) == num_blobs
    assert say(chat, "three") is None
    assert chat.session.generation == 3


def test_while_another_has_the_lease_it_stays_unknown_and_is_found_out_later(engine: Engine) -> None:
    store, chat = unsure(engine)
    other = SessionManager(store, engine, holder="other").open(chat.session.id)
    with pytest.raises(LeaseLost):
        chat.save()
    other.close()
    assert chat.save().generation == 2
    assert say(chat, "three") is None
    assert len(chat.session.manifest.messages) == 6  # type: ignore[union-attr]


def test_what_another_wrote_over_a_turn_whose_answer_was_lost_is_not_overwritten(engine: Engine) -> None:
    store, chat = unsure(engine)
    SessionManager(store, engine, holder="other").rewind(chat.session.id)
    with pytest.raises(StaleSession):
        chat.save()


def test_closing_while_the_store_is_away_is_no_error(engine: Engine) -> None:
    store = FaultyStore(MemoryStore())
    chat = Conversation.new(SessionManager(store, engine))
    store.plan, store.num_calls = "r" * 1000, 0
    chat.close()


def test_a_name_is_taken_when_the_chat_begins(manager: SessionManager, engine: Engine) -> None:
    chat = Conversation.new(manager, "tale")
    with pytest.raises(SessionExists):
        Conversation.new(SessionManager(manager.store, engine, holder="other"), "tale")
    with pytest.raises(SessionExists):
        manager.fork(talked(manager), "tale")
    say(chat, "one")
    assert chat.save_error is None
    unsaved = Conversation.new(manager, "other")
    unsaved.close()
    assert talked(manager, "other") == manager.info("other").id


def test_of_two_forks_with_one_name_the_second_leaves_nothing(
    manager: SessionManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = talked(manager)
    encode = type(manager.manifest(source)).encode
    done: list[str] = []

    def meanwhile(manifest: object) -> bytes:
        if not done:
            done.append("")
            done[0] = manager.fork(source, "same").id
        return encode(manifest)  # type: ignore[arg-type]

    monkeypatch.setattr(type(manager.manifest(source)), "encode", meanwhile)
    with pytest.raises(SessionExists):
        manager.fork(source, "same")
    assert {info.id for info in manager.list()} == {source, done[0]}
    assert manager.info("same").id == done[0]


def test_gc_leaves_the_name_of_a_session_that_came_while_it_looked(engine: Engine) -> None:
    store = Interleaved()
    manager = SessionManager(store, engine)
    source = talked(manager)
    plan = manager.plan_gc()
    made: list[str] = []
    store.at = names.NAMES
    store.between = lambda: made.append(manager.fork(source, "fresh").id)  # type: ignore[method-assign]
    manager.collect(plan)
    assert manager.info("fresh").id == made[0]


def test_gc_leaves_a_session_that_was_saved_since_it_was_found_old(store: DiskStore, engine: Engine) -> None:
    manager = SessionManager(store, engine, Policy(session_ttl=0, lease=5, grace=10))
    old, saved = talked(manager), talked(manager)
    plan = manager.plan_gc()
    assert set(plan.expired) == {old, saved}
    manager.rename(saved, "awake")
    assert manager.collect(plan).expired == (old,)
    assert [info.id for info in manager.list()] == [saved]


def test_a_pin_that_is_removed_while_pins_are_listed_is_just_not_there(engine: Engine) -> None:
    store = Interleaved()
    manager = SessionManager(store, engine)
    manager.pin(talked(manager), "kept")
    refs = dict(store.list_refs(names.PINS))
    manager.unpin("kept")
    listed = super(Interleaved, store).list_refs
    store.list_refs = lambda prefix: iter(refs.items()) if prefix == names.PINS else listed(prefix)  # type: ignore[method-assign]
    assert manager.pins() == []
    assert len(manager.list()) == 1


@pytest.fixture
def damaged(manager: SessionManager, tmp_path: Path) -> tuple[str, str]:
    """A session whose manifest is damaged, and a sound one."""
    bad, good = talked(manager, "bad"), talked(manager, "good")
    blob = manager.store.read(names.session_ref(bad))
    assert blob is not None
    (path,) = (tmp_path / "store").rglob(blob.decode().rpartition("-")[2])
    path.write_bytes(b"junk")
    return bad, good


def test_a_damaged_session_does_not_keep_the_others_away(
    manager: SessionManager, damaged: tuple[str, str]
) -> None:
    bad, good = damaged
    assert [info.id for info in manager.list()] == [good]
    assert list(manager.unreadable()) == [names.session_ref(bad)]
    assert manager.usage().total == manager.store.usage()
    assert manager.rewind("good").turns == 0
    assert manager.load(manager.pin("good", "kept").name).length == 0
    with pytest.raises(Corrupt):
        manager.info("bad")
    with pytest.raises(Corrupt):  # nothing is deleted on a guess
        manager.plan_gc()


def test_repair_leaves_a_session_alone_that_somebody_writes_to(
    manager: SessionManager, tmp_path: Path
) -> None:
    chat = Conversation.new(manager)
    say(chat, "one")
    blob = next(manager.manifest(chat.session.id).blobs()).blob
    (path,) = (tmp_path / "store").rglob(blob.rpartition("-")[2])
    path.write_bytes(b"junk")
    report = manager.repair()
    assert not report.clean
    assert "left alone" in report.repaired[0]
    say(chat, "two")
    assert chat.save_error is None
    chat.close()
    assert manager.repair().clean


@pytest.mark.parametrize(
    ("kind", "pin"), [(ManifestKind.PIN, "../../x"), (ManifestKind.PIN, "x"), (ManifestKind.TOMBSTONE, None)]
)
def test_an_archive_cannot_say_what_it_becomes(
    manager: SessionManager, engine: Engine, tmp_path: Path, kind: ManifestKind, pin: str | None
) -> None:
    crafted = replace(manager.manifest(talked(manager)), kind=kind, pin=pin)
    file = io.BytesIO()
    write_archive(file, crafted, manager.store)
    there = SessionManager(DiskStore(tmp_path / "there", "default"), engine)
    info = there.import_(io.BytesIO(file.getvalue()))
    found = rebuild_refs(there.store)
    assert (list(found.refs), found.lost) == ([names.session_ref(info.id)], ())


def test_a_stored_manifest_with_a_name_that_may_not_be_one_does_not_stop_a_repair(
    manager: SessionManager,
) -> None:
    manifest = manager.manifest(talked(manager))
    manager.store.put(BlobClass.MANIFEST, replace(manifest, kind=ManifestKind.PIN, pin="../x").encode())
    found = rebuild_refs(manager.store)
    assert list(found.refs) == [names.session_ref(manifest.session)]
    assert "may not be a name" in found.lost[0]


def test_rows_from_an_archive_are_no_one_elses(
    manager: SessionManager, engine: Engine, tmp_path: Path
) -> None:
    session = talked(manager, text="word " * 100)
    file = io.BytesIO()
    manager.export(session, file)
    there = SessionManager(DiskStore(tmp_path / "there", "default"), engine)
    info = there.import_(io.BytesIO(file.getvalue()))
    manifest = there.manifest(info.id)
    assert {span.provenance for span in manifest.spans} == {Provenance.IMPORTED}
    assert there.known_prefix(manifest.tokens) is None
    chat = Conversation.open(there, info.id)
    assert chat.restored is not None
    assert chat.restored.recomputed == 0
    say(chat, "more")
    assert chat.save_error is None


def test_what_is_gone_when_it_is_looked_at_is_not_found(
    manager: SessionManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = talked(manager)
    monkeypatch.setattr(SessionManager, "list", lambda _: [])
    with pytest.raises(SessionNotFound):
        manager.info(session)
    with pytest.raises(NameRefused):
        manager.info("../x")


def test_repair_says_which_session_is_lost_and_which_turn_another_is_back_at(
    manager: SessionManager, damaged: tuple[str, str], tmp_path: Path
) -> None:
    bad, good = damaged
    manager.rename(good, "newer")
    manager.rename(good, "newest")
    blob = manager.store.read(names.session_ref(good))
    assert blob is not None
    (path,) = (tmp_path / "store").rglob(blob.decode().rpartition("-")[2])
    path.unlink()
    told = manager.repair().repaired
    assert any(line.startswith(f"session/{bad} is lost") for line in told)
    assert f"session/{good} is back at turn 2, the last that can be read" in told
    assert manager.info(good).name == "newer"
    assert manager.check().clean


def test_repair_of_one_session_never_moves_another_to_a_turn_that_was_not_committed(
    manager: SessionManager, damaged: tuple[str, str]
) -> None:
    _, good = damaged
    manifest = manager.manifest(good)
    manager.store.put(BlobClass.MANIFEST, replace(manifest, generation=9, title="never was").encode())
    assert manager.repair().clean
    assert manager.manifest(good) == manifest


def test_rows_that_expired_are_no_problem_and_rows_that_are_lost_are(engine: Engine) -> None:
    class Expiring(MemoryStore):
        expire = True

        @property
        def rows_expire(self) -> bool:
            return self.expire

    store = Expiring()
    manager = SessionManager(store, engine)
    session = talked(manager)
    for blob in [ref.blob for ref in manager.manifest(session).blobs()]:
        store.delete_blob(blob, 0)
    report = manager.check()
    assert (report.clean, report.expired) == (True, 1)
    store.expire = False
    report = manager.check()
    assert [problem.kind for problem in report.problems] == ["missing"]
    assert report.expired == 0


def test_a_lease_from_a_clock_that_went_back_bars_nobody(engine: Engine) -> None:
    clock = [1e9]
    store = MemoryStore(clock=lambda: clock[0])
    first = acquire(store, "X", "me")
    clock[0] -= 86400
    second = acquire(store, "X", "you")
    assert second.until < clock[0] + 60
    with pytest.raises(LeaseLost):
        first.renew()
