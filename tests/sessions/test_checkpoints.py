"""Chats with models that cannot rewind: an edit begins at the nearest checkpoint, and says what it read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.errors import FingerprintMismatch, NoSlot
from engine.runner import Engine
from engine.scheduler import Options, Scheduler
from engine.state import PartKind, Pending, SamplerParams
from serialization.resume import can_resume_at
from sessions.conversation import Conversation, Reply
from sessions.manager import SessionManager
from sessions.policy import Policy
from sessions.restore import Fallback, Reason, restore
from sessions.stores.memory import MemoryStore
from tests.exact.members import open_member

FAMILIES = ("mamba2", "falcon_h1", "qwen3_next")
ASK = Reply(max_tokens=6)
LONG = "And so it went on, from one page to the next. " * 8


def engine_of(family: str, **settings: object) -> Engine:
    return open_member(family, "f32", n_ctx=2048, num_cells=4096, **settings)


def told(chat: Conversation, text: str) -> str:
    return "".join(piece.text for piece in chat.say(text, ASK))


@pytest.mark.parametrize("family", FAMILIES)
def test_editing_the_last_message_reads_nothing_before_it_again(family: str) -> None:
    chat = Conversation.new(SessionManager(MemoryStore(), engine_of(family)))
    for text in ("one", "two", "three"):
        told(chat, text)
    first = list(chat.edit("four", ASK))
    assert chat.reused is None, "nothing had to be read again"
    assert [piece.token for piece in chat.regenerate(ASK)] == [piece.token for piece in first]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_edit_after_a_resume_goes_back_to_a_stored_checkpoint(family: str) -> None:
    manager = SessionManager(MemoryStore(), engine_of(family))
    chat = Conversation.new(manager)
    for text in ("one", "two", "three"):
        told(chat, text)
    edited = [piece.token for piece in chat.edit("four", ASK)]
    chat.rewind()
    told(chat, "three")
    chat.close()
    again = Conversation.open(SessionManager(manager.store, engine_of(family)), chat.session.id)
    assert again.restored is not None
    assert again.restored.recomputed == 0
    assert [piece.token for piece in again.edit("four", ASK)] == edited
    assert again.reused is None


@pytest.mark.parametrize("family", FAMILIES)
def test_without_its_checkpoint_an_edit_reads_from_the_nearest_before(family: str) -> None:
    engine = engine_of(family, checkpoint_bytes=0)
    manager = SessionManager(MemoryStore(), engine, Policy(checkpoints=0))
    chat = Conversation.new(manager)
    told(chat, LONG)
    told(chat, "two")
    list(chat.edit("three", ASK))
    assert chat.reused is not None
    assert chat.reused.reason is Reason.NO_CHECKPOINT
    assert chat.reused.recomputed > len(LONG) // 2, "no checkpoint was kept, so all was read again"
    assert chat.reused.restored <= 1, "the pending token alone, which needs no rows"


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_with_little_room_for_checkpoints_none_is_taken_again_and_again(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = kept * state_nbytes("mamba2")
    engine = engine_of("mamba2", checkpoint_bytes=room, checkpoint_every=50, max_batch=64, num_seqs=4)
    batches, marks = [], []
    plan, mark = engine._memory.plan, engine._memory.mark
    monkeypatch.setattr(engine._memory, "plan", lambda batch: (batches.append(len(batch)), plan(batch))[1])
    monkeypatch.setattr(engine._memory, "mark", lambda seq: (marks.append(seq), mark(seq))[1])
    seqs = [engine.create() for _ in range(4)]
    for seq in seqs:
        engine.feed(seq, [(seq + 7 * at) % 256 for at in range(120)])
    assert batches == [50, 50, 20] * 4
    assert marks == [seq for seq in seqs for _ in range(2)]
    for _ in range(29):
        engine.decode(seqs)
    assert len(marks) == 8, "the next place is 150"


def test_with_little_room_for_checkpoints_the_last_message_can_be_edited_all_the_same() -> None:
    room = 2 * state_nbytes("mamba2")
    engine = engine_of("mamba2", checkpoint_bytes=room, checkpoint_every=100)
    chat = Conversation.new(SessionManager(MemoryStore(), engine, Policy(checkpoints=room)))
    for text in (LONG, LONG, "a", "b", "c", "d"):
        told(chat, text)
    list(chat.edit("e", ASK))
    assert chat.reused is None
    chat.close()
    again = Conversation.open(SessionManager(chat._manager.store, engine_of("mamba2")), chat.session.id)
    list(again.edit("f", ASK))
    assert again.reused is None


def test_what_an_edit_had_to_read_again_the_next_one_has() -> None:
    engine = engine_of("mamba2")
    chat = Conversation.new(SessionManager(MemoryStore(), engine, Policy(checkpoints=0)))
    for text in (LONG, "two"):
        told(chat, text)
    chat.close()
    chat = Conversation.open(SessionManager(chat._manager.store, engine_of("mamba2")), chat.session.id)
    list(chat.edit("three", ASK))
    assert chat.reused is not None
    list(chat.edit("four", ASK))
    assert chat.reused is None


def state_nbytes(family: str) -> int:
    layout = engine_of(family).layout
    return sum(spec.row_nbytes for spec in layout if spec.kind is PartKind.POINT)


def test_a_checkpoint_is_saved_where_its_window_rows_are() -> None:
    manager = SessionManager(MemoryStore(), engine_of("deepseek_v4", checkpoint_every=64))
    chat = Conversation.new(manager)
    for text in (LONG, LONG):
        told(chat, text)
        assert chat.session.manifest is not None
        places = [checkpoint.position for checkpoint in chat.session.manifest.checkpoints]
        assert all(can_resume_at(chat.session.manifest, place) for place in places)
    assert 640 not in places


@pytest.mark.parametrize("family", FAMILIES)
def test_a_piece_of_a_state_of_another_build_is_not_believed(family: str) -> None:
    manager = SessionManager(MemoryStore(), engine_of(family))
    chat = Conversation.new(manager)
    for text in (LONG, "two"):
        told(chat, text)
    chat.close()
    stored = chat.session.stored().manifest
    piece = replace(stored, checkpoints=stored.checkpoints[:1])
    assert restore(engine_of(family), manager.store, piece, Policy())[1].restored > 0
    other = engine_of(family)
    other.fingerprint = replace(other.fingerprint, making={"torch": "another"})
    with pytest.raises(FingerprintMismatch, match="no canary"):
        restore(other, manager.store, piece, Policy())
    _, result = restore(other, manager.store, piece, Policy(), Fallback.RECOMPUTE)
    assert (result.reason, result.restored) == (Reason.FINGERPRINT, 0)


def test_a_way_back_that_is_barred_leaves_nothing_that_counts_as_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_of("mamba2", checkpoint_bytes=0)
    chat = Conversation.new(SessionManager(MemoryStore(), engine))
    for text in ("one", "two"):
        told(chat, text)

    def barred(*_: object) -> None:
        raise NoSlot("no room")

    with monkeypatch.context() as patched:
        patched.setattr(engine, "restore", barred)
        with pytest.raises(NoSlot):
            chat.rewind()
    assert (engine.length(chat._live.seq), chat.session.synced) == (0, 0)
    told(chat, "three")
    assert [message.text for message in chat.messages if message.role == "user"] == ["one", "two", "three"]


@pytest.mark.parametrize("family", FAMILIES)
def test_within_a_long_prompt_there_is_a_checkpoint_every_so_many_tokens(family: str) -> None:
    engine = engine_of(family, checkpoint_every=50, max_batch=64)
    seq = engine.create()
    engine.feed(seq, list(range(200)))
    assert [engine.last_resumable(seq, at) for at in (49, 50, 149, 199, 200)] == [0, 50, 100, 150, 200]
    engine.rewind(seq, 150)
    live = engine.fork(seq)
    engine.feed(seq, list(range(30)))
    fresh = engine_of(family, checkpoint_every=50, max_batch=64)
    again = fresh.create()
    for start in range(0, 150, 50):
        fresh.feed(again, list(range(start, start + 50)))
    fresh.feed(again, list(range(30)))
    one, other = engine.logits(seq), fresh.logits(again)
    assert one is not None
    assert other is not None
    assert one.equal(other)
    assert engine.length(live) == 150


def test_prompts_of_a_scheduler_have_their_checkpoints_at_the_same_places() -> None:
    engine = engine_of("mamba2", checkpoint_every=50, max_batch=64)
    scheduler = Scheduler(engine)
    talking, waiting = engine.create(), engine.create()
    scheduler.submit(talking, [1, 2, 3], Options(max_tokens=20))
    scheduler.submit(waiting, list(range(180)), Options(max_tokens=1))
    while len(scheduler):
        scheduler.step()
    assert [engine.last_resumable(waiting, at) for at in (99, 149, 179)] == [50, 100, 150]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_that_begins_as_another_shares_it_up_to_a_checkpoint(family: str) -> None:
    engine = engine_of(family, checkpoint_every=50, max_batch=50)
    seq = engine.create()
    engine.feed(seq, list(range(120)))
    other = engine.create()
    assert engine.feed(other, [*range(110), 7, 8, 9]).shared == 100


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_that_the_tokenizer_does_not_have_is_never_said(family: str) -> None:
    engine = engine_of(family)
    beyond = [(token, 1e6) for token in range(engine.tokenizer.vocab_size, 300)]
    seq = engine.create(SamplerParams(temperature=2.0, logit_bias=tuple(beyond)))
    engine.feed(seq, [1, 2, 3])
    assert all(engine.decode([seq])[seq] < engine.tokenizer.vocab_size for _ in range(20))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_state_of_another_build_is_believed_after_a_canary_from_its_checkpoint(family: str) -> None:
    store = MemoryStore()
    manager = SessionManager(store, engine_of(family, checkpoint_every=40, max_batch=40))
    engine = manager.engine
    seq = engine.create()
    engine.feed(seq, list(range(100)))
    engine.decode([seq])
    session = manager.create()
    manager.save(session, seq, ())
    session.close()
    other = SessionManager(store, engine_of(family, checkpoint_every=40, max_batch=40))
    making = {**other.engine.fingerprint.making, "threads": 99}
    other.engine.fingerprint = replace(other.engine.fingerprint, making=making)
    opened = other.open(session.id)
    again, result = other.resume(opened)
    assert result.reason is Reason.COMPATIBLE
    assert result.recomputed == 0
    assert isinstance(other.engine.edge(again), Pending)
