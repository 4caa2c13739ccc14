"""A drafter's state is part of its session: saved, resumed, cut, moved and mended with it."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
import torch

from engine.errors import BlobMissing, Corrupt
from engine.runner import Engine
from engine.speculative.model_drafter import ModelDrafter
from engine.speculative.ngram import NgramDrafter
from engine.state import DraftState, PartKind, SeqId
from serialization.manifest import Manifest
from serialization.snapshot import read_state
from sessions.conversation import Conversation, Reply
from sessions.manager import SessionManager
from sessions.policy import Policy
from sessions.restore import Fallback, Reason
from sessions.session import Session
from sessions.stores.memory import MemoryStore
from tests.exact.members import open_member
from tests.serialization.states import CountingStore

#: of every kind of memory that a draft can have: token rows, windows, point state, and all of it
DRAFTERS = ("qwen3", "gemma3", "mamba2", "recurrent_gemma")
CUTTABLE = ("qwen3",)
TEXT = [3 + (7 * at + at * at // 5) % 90 for at in range(2000)]
SETTINGS = {"n_ctx": 2048, "num_cells": 8192}


def plain() -> Engine:
    return open_member("llama", "f32", **SETTINGS)


def drafting(family: str = "qwen3", **settings: object) -> Engine:
    """A target whose drafter is a model of `family`."""
    engine = plain()
    engine.speculate(ModelDrafter(open_member(family, "f32", **{**SETTINGS, **settings}), engine), 3)
    return engine


def turn(engine: Engine, seq: SeqId, tokens: Sequence[int], steps: int = 4) -> None:
    """Read `tokens`, then say a little, which is when a drafter reads along."""
    engine.feed(seq, tokens)
    engine.choose(seq)
    for _ in range(steps):
        engine.step(seq)
    engine.mark(seq)


def saved(manager: SessionManager, count: int = 600) -> tuple[Session, SeqId]:
    seq, session = manager.engine.create(), manager.create()
    turn(manager.engine, seq, TEXT[:count])
    manager.save(session, seq, ())
    return session, seq


def draft_in(engine: Engine, seq: SeqId) -> DraftState:
    """What the engine's drafter keeps of the sequence."""
    draft = engine.snapshot(seq).draft
    assert draft is not None
    return draft


def manifest_of(manager: SessionManager, session: Session) -> Manifest:
    manifest = manager.manifest(session.id)
    assert (manifest.draft is not None) == ("draft" in manifest.features)
    return manifest


def draft_length(manifest: Manifest) -> int:
    return manifest.draft.length if manifest.draft else 0


def rows_of(draft: DraftState, kind: PartKind) -> list[torch.Tensor]:
    """All rows of every part of one kind."""
    runs = [run for run in draft.rows if run.kind is kind]
    return [torch.cat(pieces) for pieces in zip(*(run.parts for run in runs), strict=True)]


def same(mine: DraftState, theirs: DraftState) -> bool:
    """Whether both are one state, bit for bit. Of a window one may hold more rows than the other."""
    pairs = [
        (a[len(a) - min(len(a), len(b)) :], b[len(b) - min(len(a), len(b)) :])
        for kind in PartKind
        for a, b in zip(rows_of(mine, kind), rows_of(theirs, kind), strict=True)
    ]
    for a, b in zip(mine.points[-1:], theirs.points[-1:], strict=True):
        pairs += zip(a.parts, b.parts, strict=True)
    return mine.length == theirs.length and all(torch.equal(*pair) for pair in pairs)


# --- resumed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", DRAFTERS)
def test_target_and_draft_come_back_together_in_another_engine(family: str) -> None:
    manager = SessionManager(MemoryStore(), drafting(family))
    session, seq = saved(manager)
    session.close()
    other = SessionManager(manager.store, drafting(family))
    again = other.open(session.id)
    resumed, result = other.resume(again)
    manifest = manifest_of(other, again)
    assert (result.reason, result.recomputed, result.draft) == (Reason.EXACT, 0, "restored")
    assert result.draft_restored == draft_length(manifest) > 500
    assert same(draft_in(other.engine, resumed), draft_in(manager.engine, seq))
    for _ in range(5):
        assert other.engine.propose(resumed) == manager.engine.propose(seq)
        assert other.engine.step(resumed) == manager.engine.step(seq)


@pytest.mark.parametrize("family", DRAFTERS)
def test_a_turn_writes_new_rows_of_the_draft_alone(family: str) -> None:
    store = CountingStore()
    manager = SessionManager(store, drafting(family))
    session, seq = saved(manager, 1500)
    first = manifest_of(manager, session)
    turn(manager.engine, seq, TEXT[1500:1530])
    result = manager.save(session, seq, ())
    second = manifest_of(manager, session)
    assert first.draft is not None
    assert second.draft is not None
    assert second.draft.chunks[:5] == first.draft.chunks[:5]
    assert second.draft.length > 1500
    new = {ref.blob for ref in second.blobs()} - {ref.blob for ref in first.blobs()}
    assert result.blobs_written == len(new) + 1
    turn(manager.engine, seq, TEXT[:10], steps=0)  # said nothing, so the drafter has read nothing
    manager.save(session, seq, ())
    assert manifest_of(manager, session).draft == second.draft
    session.close()


def test_after_a_resume_the_stored_rows_of_the_draft_are_named_again() -> None:
    manager = SessionManager(MemoryStore(), drafting())
    session, _ = saved(manager, 900)
    session.close()
    other = SessionManager(manager.store, drafting())
    again = other.open(session.id)
    first = manifest_of(other, again)
    seq, _ = other.resume(again)
    turn(other.engine, seq, TEXT[:20])
    assert other.save(again, seq, ()).blobs_written == 3  # two partial chunks, and the manifest
    assert first.draft is not None
    second = manifest_of(other, again).draft
    assert second is not None
    assert second.chunks[:3] == first.draft.chunks[:3]


def test_an_engine_that_does_not_draft_leaves_the_draft_to_the_next_that_does() -> None:
    manager = SessionManager(MemoryStore(), drafting())
    session, _ = saved(manager)
    session.close()
    store = CountingStore()
    manager.export(session.id, out := io.BytesIO())
    moved = SessionManager(store, plain()).import_(io.BytesIO(out.getvalue()))
    other = SessionManager(store, plain())
    again = other.open(moved.id)
    draft = manifest_of(other, again).draft
    assert draft is not None
    store.got.clear()
    seq, result = other.resume(again)
    assert result.reason is Reason.EXACT
    assert (result.draft, result.draft_restored) == ("unused: no drafter is in use", 0)
    assert not {ref.blob for ref in draft.refs()} & set(store.got), "what is of no use is not read"
    turn(other.engine, seq, TEXT[:50])
    other.save(again, seq, ())
    again.close()
    assert manifest_of(other, again).draft == draft
    third = SessionManager(store, drafting())
    _, result = third.resume(third.open(again.id))
    assert (result.reason, result.draft, result.draft_restored) == (Reason.EXACT, "restored", draft.length)


def test_a_drafter_that_keeps_nothing_leaves_it_too() -> None:
    manager = SessionManager(MemoryStore(), drafting())
    session, _ = saved(manager)
    session.close()
    engine = plain()
    engine.speculate(NgramDrafter(), 3)
    other = SessionManager(manager.store, engine)
    again = other.open(session.id)
    seq, result = other.resume(again)
    assert result.draft == "unused: ngram keeps nothing"
    other.save(again, seq, ())
    assert manifest_of(other, again).draft is not None


def test_with_another_drafter_the_target_resumes_and_the_draft_is_rebuilt_and_said_so() -> None:
    manager = SessionManager(MemoryStore(), drafting("qwen3"))
    session, _ = saved(manager)
    session.close()
    other = SessionManager(manager.store, drafting("gemma3"))
    again = other.open(session.id)
    seq, result = other.resume(again)
    assert (result.reason, result.recomputed, result.draft_restored) == (Reason.EXACT, 0, 0)
    assert result.draft is not None
    assert result.draft.startswith("rebuilt: it was made by another drafter")
    turn(other.engine, seq, TEXT[:20])
    other.save(again, seq, ())
    again.close()
    mine = manifest_of(other, again).draft
    assert mine is not None
    assert other.engine.drafter is not None
    assert mine.fingerprint == other.engine.drafter.fingerprint
    third = SessionManager(manager.store, drafting("gemma3"))
    assert third.resume(third.open(again.id))[1].draft == "restored"


def test_a_session_that_was_saved_without_a_draft_says_that_it_is_rebuilt() -> None:
    manager = SessionManager(MemoryStore(), plain())
    session, seq = saved(manager)
    assert manifest_of(manager, session).features == ()
    session.close()
    other = SessionManager(manager.store, drafting())
    again = other.open(session.id)
    seq, result = other.resume(again)
    assert (result.reason, result.draft) == (Reason.EXACT, "rebuilt: the state was saved without a draft")
    turn(other.engine, seq, TEXT[:300])
    other.save(again, seq, ())  # the draft's rows begin long before those of the target that are new
    again.close()
    manifest = manifest_of(other, again)
    assert draft_length(manifest) > 800
    assert read_state(other.store, manifest).draft is not None


def test_where_nobody_drafts_nothing_is_said_of_drafts() -> None:
    manager = SessionManager(MemoryStore(), plain())
    session, _ = saved(manager)
    session.close()
    assert manager.resume(manager.open(session.id))[1].draft is None


def test_a_drafter_without_room_does_not_keep_the_target_from_resuming() -> None:
    manager = SessionManager(MemoryStore(), drafting())
    session, _ = saved(manager)
    session.close()
    other = SessionManager(manager.store, drafting(n_ctx=256, num_cells=256))
    seq, result = other.resume(other.open(session.id))
    assert (result.reason, result.restored) == (Reason.EXACT, manager.manifest(session.id).length)
    assert result.draft is not None
    assert result.draft.startswith("rebuilt: ")
    assert other.engine.step(seq)


# --- cut --------------------------------------------------------------------------------------------------


def talk(manager: SessionManager, *said: str) -> Conversation:
    chat = Conversation.new(manager)
    for text in said:
        for _ in chat.say(text, Reply(max_tokens=8)):
            pass
    return chat


@pytest.mark.parametrize("family", DRAFTERS)
def test_a_rewound_session_resumes_with_the_draft_of_what_is_left(family: str) -> None:
    manager = SessionManager(MemoryStore(), drafting(family))
    chat = talk(manager, "one " * 90, "two " * 90, "three " * 90)
    chat.close()
    whole = manifest_of(manager, chat.session)
    manager.rewind(chat.session.id)
    left = manifest_of(manager, chat.session)
    assert left.length < whole.length
    assert draft_length(left) <= left.length
    assert {ref.blob for ref in left.blobs()} <= {ref.blob for ref in whole.blobs()}
    assert draft_length(left) > 0, "the nearest checkpoint before, at worst"
    assert draft_length(left) == left.length or family not in CUTTABLE
    other = SessionManager(manager.store, drafting(family))
    _, result = other.resume(other.open(chat.session.id))
    assert (result.draft, result.draft_restored) == ("restored", draft_length(left))


@pytest.mark.parametrize("family", DRAFTERS)
def test_a_fork_has_the_draft_and_a_fork_of_a_part_what_of_it_can_be_had(family: str) -> None:
    manager = SessionManager(MemoryStore(), drafting(family))
    session, _ = saved(manager)
    session.close()
    whole = manifest_of(manager, session)
    fork = manager.manifest(manager.fork(session.id).id)
    assert fork.draft == whole.draft
    part = manager.manifest(manager.fork(session.id, length=300).id)
    assert draft_length(part) == (300 if family in CUTTABLE else 0)
    other = SessionManager(manager.store, drafting(family))
    _, result = other.resume(other.open(part.session))
    assert (result.reason, result.restored) == (Reason.EXACT, 300)
    assert result.draft_restored == draft_length(part)
    assert result.draft is not None
    assert result.draft == "restored" if part.draft else result.draft.startswith("rebuilt: ")


@pytest.mark.parametrize("family", DRAFTERS)
def test_a_message_that_is_said_otherwise_is_saved_with_its_own_draft(family: str) -> None:
    manager = SessionManager(MemoryStore(), drafting(family))
    chat = talk(manager, "one " * 90, "two " * 90)
    for _ in chat.edit("three " * 90, Reply(max_tokens=8)):
        pass
    chat.close()
    other = SessionManager(manager.store, drafting(family))
    seq, result = other.resume(other.open(chat.session.id))
    assert result.draft == "restored"
    fresh = drafting(family)
    new = fresh.create()
    tokens = other.engine.tokens(seq)
    fresh.feed(new, tokens)
    fresh.set_pending(new, other.engine.choose(seq))
    assert fresh.propose(new) == other.engine.propose(seq), "guesses are those of who read just this"


def test_an_equal_past_comes_with_its_draft() -> None:
    manager = SessionManager(MemoryStore(), drafting())
    talk(manager, "the same long story for all " * 40).close()
    other = SessionManager(manager.store, drafting())
    chat = Conversation.new(other)
    for _ in chat.say("the same long story for all " * 40 + "but this", Reply(max_tokens=2)):
        pass
    assert chat.reused is not None
    assert chat.reused.reason is Reason.PREFIX
    assert chat.reused.restored >= 512
    first, second = (manager.manifest(info.id) for info in manager.list())
    assert first.draft is not None
    assert second.draft is not None
    assert first.draft.chunks[:2] == second.draft.chunks[:2], "bit for bit the same rows, and stored once"


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
