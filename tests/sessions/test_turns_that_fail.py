"""Whatever a turn meets, the conversation before it stays whole: in memory, and so that it can be saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import ContextFull
from engine.runner import Engine
from engine.template import template_for
from sessions.conversation import Conversation, Reply
from sessions.manager import SessionManager
from sessions.restore import Reason
from sessions.stores.disk import DiskStore
from sessions.stores.memory import MemoryStore
from tests.faults import FaultyStore
from tests.sessions.conftest import MakeEngine

SHORT = Reply(max_tokens=12)

#: Says only the last three messages as they were, as templates do that drop what a model thought.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if loop.index0 >= messages|length - 3 else OTHER }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def hear(pieces: object) -> str:
    return "".join(piece.text for piece in pieces)  # type: ignore[attr-defined]


def forget(engine: Engine, instead: str = "''") -> None:
    engine.template = template_for(engine.tokenizer, FORGETFUL.replace("OTHER", instead))


def asked(chat: Conversation) -> list[str]:
    return [message.text for message in chat.messages if message.role == "user"]


def test_a_template_that_drops_the_past_at_each_turn_can_be_saved_at_each(manager: SessionManager) -> None:
    forget(manager.engine)
    chat = Conversation.new(manager)
    for turn in range(5):
        hear(chat.say(f"question number {turn} " * 5, SHORT))
        assert chat.save_error is None
    chat.rewind(2)
    assert chat.save_error is None
    hear(chat.say("and now?", SHORT))
    assert chat.save_error is None
    assert len(asked(chat)) == 4
    chat.close()
    again = Conversation.open(manager, chat.session.id)
    assert again.messages == chat.messages


def test_a_turn_that_diverged_and_did_not_fit_leaves_a_conversation_that_can_be_saved(
    make_engine: MakeEngine, store: DiskStore
) -> None:
    manager = SessionManager(store, make_engine(n_ctx=256))
    chat = Conversation.new(manager)
    hear(chat.say("a" * 60, SHORT))
    hear(chat.say("b" * 20, SHORT))
    chat.close()
    forget(manager.engine, "'changed' * 20")
    chat = Conversation.open(manager, chat.session.id)
    with pytest.raises(ContextFull):
        hear(chat.say("c" * 150, SHORT))
    chat.save()
    assert asked(chat) == ["a" * 60, "b" * 20]


def test_an_edit_that_cannot_fit_leaves_what_was_said(make_engine: MakeEngine, store: DiskStore) -> None:
    chat = Conversation.new(SessionManager(store, make_engine(n_ctx=256)))
    hear(chat.say("one", SHORT))
    hear(chat.say("two", SHORT))
    ids, messages = chat.ids, chat.messages
    with pytest.raises(ContextFull):
        hear(chat.edit("long " * 100, SHORT))
    assert (chat.ids, chat.messages) == (ids, messages)
    hear(chat.say("three", SHORT))
    assert chat.save_error is None
    assert asked(chat) == ["one", "two", "three"]


def test_a_first_prompt_beyond_the_context_is_refused_though_the_store_knows_it(
    make_engine: MakeEngine, store: DiskStore
) -> None:
    first = Conversation.new(SessionManager(store, make_engine()))
    hear(first.say("word " * 200, SHORT))
    small = Conversation.new(SessionManager(store, make_engine(n_ctx=300)))
    with pytest.raises(ContextFull):
        hear(small.say("word " * 200, SHORT))
    hear(small.say("hi", SHORT))
    assert small.save_error is None


def test_a_store_that_is_away_costs_a_hint_and_not_the_first_turn(engine: Engine) -> None:
    store = FaultyStore(MemoryStore())
    chat = Conversation.new(SessionManager(store, engine))
    store.plan, store.num_calls = "r" * 1000, 0
    hear(chat.say("x" * 300, SHORT))
    assert chat.save_error is not None
    store.plan = ""
    hear(chat.say("more", SHORT))
    assert chat.save_error is None


def test_going_back_while_the_store_is_away_reads_again(
    make_engine: MakeEngine, windowed_path: Path, store: DiskStore
) -> None:
    faulty = FaultyStore(store)
    sizes = {"num_seqs": 2, "max_batch": 32, "max_ubatch": 32, "device_state_bytes": 0}
    chat = Conversation.new(SessionManager(faulty, make_engine(windowed_path, **sizes)))
    hear(chat.say("one " * 30, SHORT))
    before = chat.ids
    hear(chat.say("two " * 430, SHORT))
    faulty.plan, faulty.num_calls = "r" * 1000, 0
    assert chat.rewind().recomputed > 0
    assert chat.ids == before
    faulty.plan = ""
    hear(chat.say("three", SHORT))
    assert chat.save_error is None


def test_saying_it_anew_tells_what_had_to_be_read_again(
    make_engine: MakeEngine, windowed_path: Path, store: DiskStore
) -> None:
    sizes = {"num_seqs": 2, "max_batch": 32, "max_ubatch": 32, "device_state_bytes": 0}
    chat = Conversation.new(SessionManager(store, make_engine(windowed_path, **sizes)))
    hear(chat.say("one " * 30, SHORT))
    hear(chat.say("two " * 430, SHORT))
    hear(chat.regenerate(SHORT))
    assert chat.reused is not None
    assert chat.reused.reason is Reason.NO_CHECKPOINT
    assert chat.reused.recomputed > 0


def test_text_with_half_a_character_is_stored_with_its_replacement(manager: SessionManager) -> None:
    chat = Conversation.new(manager, system="a\udcff")
    hear(chat.say("b\ud800", SHORT))
    hear(chat.edit("c\udfff", SHORT))
    assert chat.save_error is None
    assert [m.text for m in manager.manifest(chat.session.id).messages][:2] == ["a\ufffd", "c\ufffd"]


def test_an_interrupted_save_is_known_to_be_owed(
    manager: SessionManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> object:
        raise KeyboardInterrupt

    chat = Conversation.new(manager)
    with monkeypatch.context() as patch:
        patch.setattr(SessionManager, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            hear(chat.say("one", SHORT))
    assert chat.save_error is not None
    chat.save()
    assert [m.text for m in manager.manifest(chat.session.id).messages][:1] == ["one"]


def test_rows_of_another_build_are_not_shared_without_their_canary(
    make_engine: MakeEngine, store: DiskStore
) -> None:
    first = Conversation.new(SessionManager(store, make_engine()))
    hear(first.say("word " * 100, SHORT))
    other = SessionManager(store, make_engine())
    making = {**other.engine.fingerprint.making, "torch": "another"}
    other.engine.fingerprint = type(other.engine.fingerprint)(other.engine.fingerprint.meaning, making)
    second = Conversation.new(other)
    hear(second.say("word " * 100, SHORT))
    assert second.reused is not None
    assert second.reused.reason is Reason.NEW
