"""A drafter's state is part of its session: saved, resumed, cut, moved and mended with it."""

from __future__ import annotations

import io

import pytest

from engine.speculative.ngram import NgramDrafter
from serialization.snapshot import read_state
from sessions.conversation import Conversation, Reply
from sessions.manager import SessionManager
from sessions.restore import Reason
from sessions.stores.memory import MemoryStore
from tests.serialization.states import CountingStore
from tests.sessions.drafting import (
    CUTTABLE,
    DRAFTERS,
    TEXT,
    draft_in,
    draft_length,
    drafting,
    manifest_of,
    plain,
    same,
    saved,
    turn,
)

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
