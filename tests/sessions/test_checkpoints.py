"""Chats with models that cannot rewind: an edit begins at the nearest checkpoint, and says what it read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.runner import Engine
from engine.state import Pending, SamplerParams
from sessions.conversation import Conversation, Reply
from sessions.manager import SessionManager
from sessions.policy import Policy
from sessions.restore import Reason
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
