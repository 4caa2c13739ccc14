"""A draft that is damaged or gone costs a session the draft alone; its blobs are kept, counted and moved."""

from __future__ import annotations

import io

import pytest

from engine.errors import BlobMissing, Corrupt
from sessions.manager import SessionManager
from sessions.policy import Policy
from sessions.restore import Fallback, Reason
from sessions.session import Session
from sessions.stores.memory import MemoryStore
from tests.serialization.states import CountingStore
from tests.sessions.drafting import (
    DRAFTERS,
    TEXT,
    draft_length,
    drafting,
    manifest_of,
    plain,
    saved,
    turn,
)

# --- damaged ----------------------------------------------------------------------------------------------


def damaged() -> tuple[SessionManager, CountingStore, Session]:
    store = CountingStore()
    manager = SessionManager(store, drafting(), Policy(lease=5, grace=10))
    session, _ = saved(manager)
    session.close()
    blob = min(manifest_of(manager, session).of_draft())
    store.faults = {blob: b"?" + store.get(blob)[1:]}
    return manager, store, session


def test_a_damaged_draft_is_refused_and_nothing_is_left_in_the_engine() -> None:
    _, store, session = damaged()
    other = SessionManager(store, drafting())
    again = other.open(session.id)
    with pytest.raises(Corrupt):
        other.resume(again)
    again.close()
    seqs = [other.engine.create() for _ in range(other.engine.config.num_seqs)]
    assert all(other.engine.length(seq) == 0 for seq in seqs)


def test_who_would_rather_read_again_reads_nothing_again_for_a_damaged_draft() -> None:
    _, store, session = damaged()
    other = SessionManager(store, drafting())
    again = other.open(session.id)
    seq, result = other.resume(again, Fallback.RECOMPUTE)
    assert (result.reason, result.recomputed, result.draft_restored) == (Reason.EXACT, 0, 0)
    assert result.draft is not None
    assert result.draft.startswith("rebuilt: blob rows-")
    turn(other.engine, seq, TEXT[:10])
    other.save(again, seq, ())
    again.close()
    store.faults = {}
    assert other.check().clean


def test_a_draft_that_was_made_anew_is_written_anew_though_it_is_of_the_same_tokens() -> None:
    store = CountingStore()
    manager = SessionManager(store, drafting())
    session, _ = saved(manager)
    session.close()
    for blob in manifest_of(manager, session).of_draft():
        assert store.delete_blob(blob, 0)
    other = SessionManager(store, drafting())
    again = other.open(session.id)
    seq, _ = other.resume(again, Fallback.RECOMPUTE)
    other.engine.propose(seq)
    other.save(again, seq, ())
    again.close()
    assert draft_length(manifest_of(other, again)) > 600
    assert other.check().clean, "no chunk that is gone is named again"


def test_rows_of_the_draft_behind_a_rewind_are_written_anew() -> None:
    manager = SessionManager(MemoryStore(), drafting())
    session, seq = saved(manager)
    assert (session.synced, session.draft_synced) == (
        manager.manifest(session.id).length,
        draft_length(manifest_of(manager, session)),
    )
    manager.engine.rewind(seq, 300)
    session.cut(300)
    assert (session.synced, session.draft_synced) == (300, 300)
    session.close()


def test_check_finds_a_damaged_draft_and_repair_gives_up_nothing_else() -> None:
    manager, store, session = damaged()
    before = manifest_of(manager, session)
    (problem,) = manager.check().problems
    assert problem.kind == "corrupt"
    assert "of its draft" in problem.message
    report = manager.repair()
    assert report.clean
    assert "nothing else is lost" in report.repaired[0]
    after = manifest_of(manager, session)
    assert after.draft is None
    assert (after.chunks, after.tokens, after.messages, after.edge) == (
        before.chunks,
        before.tokens,
        before.messages,
        before.edge,
    )
    other = SessionManager(store, drafting())
    _, result = other.resume(other.open(session.id))
    assert (result.reason, result.recomputed) == (Reason.EXACT, 0)
    assert result.draft == "rebuilt: the state was saved without a draft"


def test_damaged_rows_of_the_target_leave_the_draft_of_what_is_left() -> None:
    manager = SessionManager(CountingStore(), drafting(), Policy(lease=5, grace=10))
    session, _ = saved(manager)
    session.close()
    store, manifest = manager.store, manifest_of(manager, session)
    assert isinstance(store, CountingStore)
    blob = manifest.chunks[1].blobs[0].ref.blob
    store.faults = {blob: b"?"}
    assert manager.repair().clean
    assert draft_length(manifest_of(manager, session)) == draft_length(manifest)
    other = SessionManager(store, drafting())
    _, result = other.resume(other.open(session.id))
    assert (result.reason, result.restored) == (Reason.NO_CHECKPOINT, 256)
    assert (result.draft, result.draft_restored) == ("restored", 256)


def test_a_missing_draft_is_refused_but_where_rows_expire() -> None:
    class Expiring(MemoryStore):
        rows_expire = False  # type: ignore[assignment]

    store = Expiring()
    manager = SessionManager(store, drafting())
    session, _ = saved(manager)
    session.close()
    manifest = manifest_of(manager, session)
    for blob in manifest.of_draft():
        assert store.delete_blob(blob, 0)
    other = SessionManager(store, drafting())
    again = other.open(session.id)
    with pytest.raises(BlobMissing):
        other.resume(again)
    store.rows_expire = True  # type: ignore[assignment]
    _, result = other.resume(again)
    assert (result.reason, result.recomputed) == (Reason.EXACT, 0)
    assert result.draft is not None
    assert result.draft.startswith("rebuilt: ")


# --- kept and counted -------------------------------------------------------------------------------------


def test_gc_keeps_the_blobs_of_a_draft_and_takes_those_of_one_that_was_superseded() -> None:
    clock = [1e6]
    store = MemoryStore(clock=lambda: clock[0])
    manager = SessionManager(store, drafting(), Policy(lease=5, grace=10))
    session, seq = saved(manager)
    old = manifest_of(manager, session)
    turn(manager.engine, seq, TEXT[:400])
    manager.save(session, seq, ())
    session.close()
    clock[0] += 100
    manager.collect(manager.plan_gc())
    new = manifest_of(manager, session)
    there = {info.blob for info in store.list_blobs()}
    assert {ref.blob for ref in new.blobs()} <= there
    assert old.of_draft() - new.of_draft()
    assert not (old.of_draft() - new.of_draft()) & there
    assert manager.check().clean


def test_rows_that_are_given_up_are_the_drafts_too() -> None:
    manager = SessionManager(MemoryStore(), drafting())
    session, _ = saved(manager)
    session.close()
    manager.release_rows(session.id)
    assert manifest_of(manager, session).draft is None
    _, result = manager.resume(manager.open(session.id))
    assert result.reason is Reason.EXPIRED
    assert result.draft == "rebuilt: the state was saved without a draft"


def test_the_bytes_of_a_draft_are_counted() -> None:
    sizes = []
    for engine in (plain(), drafting()):
        manager = SessionManager(MemoryStore(), engine)
        session, _ = saved(manager)
        session.close()
        info, usage = manager.info(session.id), manager.usage()
        manifest = manifest_of(manager, session)
        assert info.own_bytes >= sum(ref.nbytes for ref in manifest.blobs())
        assert usage.rows_bytes == sum(ref.nbytes for ref in manifest.blobs())
        sizes.append(info.own_bytes)
    assert sizes[1] > sizes[0]


@pytest.mark.parametrize("family", DRAFTERS)
def test_a_draft_goes_along_into_an_archive_live_or_stored(family: str) -> None:
    manager = SessionManager(MemoryStore(), drafting(family))
    session, seq = saved(manager)
    stored, live = io.BytesIO(), io.BytesIO()
    manager.export(session.id, stored)
    manager.export_live(session, seq, (), live)
    for out in (stored, live):
        other = SessionManager(MemoryStore(), drafting(family))
        moved = other.import_(io.BytesIO(out.getvalue()))
        _, result = other.resume(other.open(moved.id))
        assert (result.reason, result.draft) == (Reason.EXACT, "restored")


def test_a_session_that_was_read_again_for_want_of_rows_says_the_same_of_its_draft() -> None:
    manager = SessionManager(CountingStore(), drafting())
    session, _ = saved(manager)
    session.close()
    store, manifest = manager.store, manifest_of(manager, session)
    assert isinstance(store, CountingStore)
    store.faults = {manifest.chunks[0].blobs[0].ref.blob: b"?"}
    other = SessionManager(store, drafting())
    _, result = other.resume(other.open(session.id), Fallback.RECOMPUTE)
    assert (result.reason, result.restored) == (Reason.CORRUPT, 0)
    assert (result.draft, result.draft_restored) == ("rebuilt: the tokens are read again", 0)
