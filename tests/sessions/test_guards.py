"""What changed between reading and committing is noticed: by a guard, a fence, or a comparison."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from engine.errors import LeaseLost, StaleSession, StoreUnavailable
from engine.runner import Engine
from engine.state import SeqId
from serialization.blobs import BlobClass, BlobId, Bytes
from sessions.conversation import Conversation, Reply
from sessions.manager import SessionManager
from sessions.names import PREFIXES
from sessions.policy import Policy
from sessions.session import Session
from sessions.stores.memory import MemoryStore

POLICY = Policy(lease=0.3, grace=60)


class Meddled(MemoryStore):
    """Something happens just before a blob is put."""

    before_put: Callable[[], object] | None = None

    def put(self, cls: BlobClass, data: Bytes) -> BlobId:
        meddle, self.before_put = self.before_put, None
        if meddle:
            meddle()
        return super().put(cls, data)


@pytest.fixture
def store() -> Meddled:
    return Meddled()


@pytest.fixture
def manager(store: Meddled, engine: Engine) -> SessionManager:
    return SessionManager(store, engine, POLICY)


def saved(manager: SessionManager, text: str) -> tuple[Session, SeqId]:
    engine = manager.engine
    seq = engine.create()
    engine.feed(seq, engine.tokenizer.encode(text))
    session = manager.create()
    manager.save(session, seq, ())
    return session, seq


def move_on(manager: SessionManager, session: Session, seq: SeqId) -> None:
    manager.engine.feed(seq, manager.engine.tokenizer.encode("more"))
    manager.save(session, seq, ())


@pytest.mark.parametrize("verb", ["fork", "pin"])
def test_what_is_forked_or_pinned_must_still_stand_there(
    manager: SessionManager, store: Meddled, verb: str
) -> None:
    """Else gc might have deleted its blobs in between."""
    session, seq = saved(manager, "here")
    store.before_put = lambda: move_on(manager, session, seq)
    acts: dict[str, Callable[[], Any]] = {
        "fork": lambda: manager.fork(session.id),
        "pin": lambda: manager.pin(session.id, "pin"),
    }
    with pytest.raises(StaleSession):
        acts[verb]()
    assert [info.id for info in manager.list()] == [session.id]
    assert manager.pins() == []
    acts[verb]()
    session.close()


def test_a_writer_whose_lease_was_taken_over_cannot_save(manager: SessionManager, store: Meddled) -> None:
    session, seq = saved(manager, "mine")
    session.lease._stop.set()  # as if this process had been asleep
    session.lease._thread.join()
    time.sleep(POLICY.lease * 1.2)
    other = SessionManager(store, manager.engine, POLICY, holder="the other one")
    taken = other.open(session.id)
    with pytest.raises(LeaseLost, match="the other one"):
        move_on(manager, session, seq)
    again, _ = other.resume(taken)
    manager.engine.feed(again, manager.engine.tokenizer.encode("theirs"))
    other.save(taken, again, ())
    with pytest.raises(LeaseLost):
        move_on(manager, session, seq)
    assert manager.manifest(session.id).length == len("mine") + 5  # "th" is one token
    taken.close()


def test_a_hint_is_not_believed_before_the_ids_compared_equal(
    manager: SessionManager, store: Meddled
) -> None:
    engine = manager.engine
    session, _ = saved(manager, "a past of its own. " * 40)
    session.close()
    asked = engine.tokenizer.encode("a past of its own? " * 40)
    names = manager._prefixes._names(engine.fingerprint, None, asked)
    store.hint(dict.fromkeys(names, session.id.encode()))
    assert manager.known_prefix(asked) is None
    same = engine.tokenizer.encode("a past of its own. " * 30)
    hit = manager.known_prefix(same)
    assert hit is not None
    assert hit.length == len(same) // 256 * 256 or hit.length == len(same)


def test_a_hint_under_another_model_is_not_believed(manager: SessionManager, store: Meddled) -> None:
    from dataclasses import replace

    engine = manager.engine
    session, _ = saved(manager, "a past of its own. " * 40)
    session.close()
    tokens = engine.tokenizer.encode("a past of its own. " * 40)
    other = replace(engine.fingerprint, meaning={**engine.fingerprint.meaning, "weights": "others"})
    names = manager._prefixes._names(other, None, tokens)
    assert not {name for name, _ in store.list_refs(PREFIXES)} & set(names)
    store.hint(dict.fromkeys(names, session.id.encode()))
    assert manager._prefixes.find(other, tokens) is None


def test_a_save_slower_than_gc_is_an_error(engine: Engine) -> None:
    class Slow(MemoryStore):
        def put(self, cls: BlobClass, data: Bytes) -> BlobId:
            time.sleep(0.15)
            return super().put(cls, data)

    manager = SessionManager(Slow(), engine, Policy(lease=0.1, grace=0.2))
    seq = engine.create()
    engine.feed(seq, engine.tokenizer.encode("x"))
    session = manager.create()
    with pytest.raises(StoreUnavailable, match="slow"):
        manager.save(session, seq, ())
    assert manager.list() == []
    session.close()


def test_what_is_said_again_is_stored_again(manager: SessionManager) -> None:
    """The ids are the same, but their rows were computed anew, in another batch."""
    ask = Reply(max_tokens=6)
    chat = Conversation.new(manager)
    for text in ("first " * 30, "second " * 50):
        for _ in chat.say(text, ask):
            pass
    ids = chat.ids
    for _ in chat.regenerate(ask):
        pass
    assert chat.ids == ids
    assert chat.saved is not None
    assert chat.saved.blobs_written == 1 + len(range(0, len(ids), 256))
