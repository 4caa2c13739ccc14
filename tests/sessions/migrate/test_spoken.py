"""Who said what is found in the ids of a conversation, or it is said to be none."""

from __future__ import annotations

from itertools import pairwise

import pytest

from engine.runner import Engine
from serialization.manifest import Message
from sessions.conversation import Conversation, Reply
from sessions.manager import SessionManager
from sessions.migrate.imports import Wish, import_foreign
from sessions.migrate.spoken import messages_of
from sessions.stores.memory import MemoryStore
from tests.sessions.conftest import MakeEngine
from tests.sessions.migrate.files import foreign_of

USER, REPLY = ("user", "Why is it so?"), ("assistant", "Because of that.")
Said = list[tuple[str, str]]


def rendered(engine: Engine, said: Said, reply: bool) -> tuple[int, ...]:
    assert engine.template is not None
    messages = [{"role": role, "content": text} for role, text in said]
    return tuple(engine.tokenizer.encode_pieces(engine.template.render(messages, reply)))


def words(messages: tuple[Message, ...]) -> Said:
    return [(message.role, message.text) for message in messages]


@pytest.mark.parametrize(
    "said",
    [
        [USER],
        [USER, REPLY],
        [("system", "Be brief."), USER, REPLY],
        [USER, REPLY, ("user", "And then?"), ("assistant", "Nothing."), USER],
        [("user", "What is <|im_end|> for?"), ("assistant", "It ends what is said: ☂")],
        [("user", "several\n\nlines\n"), REPLY],
    ],
    ids=str,
)
def test_what_was_said_is_found(engine: Engine, said: Said) -> None:
    ids = rendered(engine, said, said[-1][0] == "user")
    messages = messages_of(engine, ids)
    assert words(messages) == said
    assert messages[0].start == 0
    assert messages[-1].stop == len(ids)
    assert all(a.stop == b.start for a, b in pairwise(messages))


def test_a_reply_that_is_not_at_its_end_is_found(engine: Engine) -> None:
    ids = rendered(engine, [USER, REPLY], False)
    assert words(messages_of(engine, ids[:-6])) == [USER, ("assistant", "Because of ")]


def test_bytes_that_are_no_character_are_found_as_they_were_shown(engine: Engine) -> None:
    ids = list(rendered(engine, [USER, REPLY], False))
    at = len(ids) - 4
    ids[at:at] = [engine.tokenizer.encode("☂")[0], engine.tokenizer.encode("☂")[1]]
    _, reply = messages_of(engine, ids)
    assert "\N{REPLACEMENT CHARACTER}" in reply.text


def test_a_reply_has_the_ids_of_its_words(engine: Engine) -> None:
    ids = rendered(engine, [USER, REPLY, USER], True)
    _, reply, _ = messages_of(engine, ids)
    assert engine.tokenizer.decode(ids[reply.start : reply.stop]) == REPLY[1]


@pytest.mark.parametrize("text", ["Once upon a time", "<|im_start|>", ""])
def test_a_text_is_no_conversation(engine: Engine, text: str) -> None:
    assert messages_of(engine, engine.tokenizer.encode(text)) == ()


def test_what_the_template_would_not_have_written_is_no_conversation(engine: Engine) -> None:
    """A control token within a message: as text of the message it has other ids."""
    ids = list(rendered(engine, [USER, REPLY], False))
    ids.insert(len(ids) // 2, engine.tokenizer.encode_special("<|endoftext|>")[0])
    assert messages_of(engine, ids) == ()


def test_without_a_template_there_is_none(engine: Engine) -> None:
    ids = rendered(engine, [USER, REPLY], False)
    engine.template = None
    assert messages_of(engine, ids) == ()


def test_a_text_of_another_system_goes_on_with_what_is_said_after_it(make_engine: MakeEngine) -> None:
    engine = make_engine(type_k="f32", type_v="f32")
    ids = tuple(engine.tokenizer.encode("Once upon a time there was"))
    manager = SessionManager(MemoryStore(), engine)
    import_foreign(manager, foreign_of(engine, ids), Wish("tale"))
    (text,) = manager.manifest("tale").messages
    assert (text.role, text.text, text.stop) == ("text", "Once upon a time there was", len(ids))
    for _ in range(2):
        chat = Conversation.open(manager, "tale")
        list(chat.say("Go on.", Reply(max_tokens=3)))
        assert chat.reused is None
        chat.close()
    manifest = manager.manifest("tale")
    assert manifest.tokens[: len(ids)] == ids
    assert manifest.spans[0].stop == len(ids)
    roles = ["text", "user", "assistant", "user", "assistant"]
    assert [message.role for message in manifest.messages] == roles
    said = [{"role": role, "content": text} for role, text in words(manifest.messages)[1:-1]]
    assert engine.template is not None
    prompt = engine.tokenizer.encode_pieces(engine.template.render(said))
    assert list(manifest.tokens[len(ids) : len(ids) + 6]) == prompt[:6]


def test_a_text_can_be_gone_back_to(make_engine: MakeEngine) -> None:
    engine = make_engine(type_k="f32", type_v="f32")
    ids = tuple(engine.tokenizer.encode("Once upon a time there was"))
    manager = SessionManager(MemoryStore(), engine)
    import_foreign(manager, foreign_of(engine, ids), Wish("tale"))
    chat = Conversation.open(manager, "tale")
    list(chat.say("Go on.", Reply(max_tokens=3)))
    chat.close()
    manager.rewind("tale")
    manifest = manager.manifest("tale")
    assert manifest.tokens == ids[: len(manifest.tokens)]
    assert len(manifest.tokens) >= len(ids) - 1
    chat = Conversation.open(manager, "tale")
    list(chat.say("Stop.", Reply(max_tokens=3)))
    chat.close()
    assert manager.manifest("tale").tokens[: len(ids)] == ids


def test_a_chat_of_another_system_goes_on_as_a_chat(make_engine: MakeEngine) -> None:
    """Not one id of it is read again."""
    engine = make_engine(type_k="f32", type_v="f32")
    ids = rendered(engine, [USER, REPLY], False)
    manager = SessionManager(MemoryStore(), engine)
    import_foreign(manager, foreign_of(engine, ids), Wish("chat"))
    assert manager.manifest("chat").title == USER[1]
    chat = Conversation.open(manager, "chat")
    list(chat.say("And then?", Reply(max_tokens=3)))
    chat.close()
    manifest = manager.manifest("chat")
    assert manifest.tokens[: len(ids)] == ids
    assert manifest.spans[0].stop == len(ids)
    assert [message.role for message in manifest.messages] == ["user", "assistant", "user", "assistant"]
