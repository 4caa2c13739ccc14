"""Where two turns part ways, and what they share."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.errors import SessionNotFound, UsageError
from engine.state import SamplerParams
from serialization.manifest import Message
from sessions.diff import Bytes, FieldDifference, TokenParting, diff
from sessions.manager import SessionManager
from sessions.named_turn import named_turn
from sessions.stores.disk import DiskStore
from tests.sessions.conftest import MakeEngine

HELLO, MORE, LESS = (Message("user", text, 0, 0) for text in ("hello", "more", "less"))


def say(manager: SessionManager, name: str, *turns: tuple[Sequence[int], Message]) -> str:
    """A session of one save a turn."""
    engine, session = manager.engine, manager.create(name)
    seq, messages = engine.create(SamplerParams(seed=len(name))), []
    for tokens, message in turns:
        engine.feed(seq, tokens)
        messages.append(message)
        manager.save(session, seq, messages)
    session.close()
    engine.close(seq)
    return session.id


BEGIN = [i % 80 + 5 for i in range(600)]


def test_a_turn_is_its_own_equal(manager: SessionManager) -> None:
    say(manager, "one", (BEGIN, HELLO))
    one = manager.manifest("one")
    found = diff(one, one)
    assert found.same_conversation
    assert found.tokens == TokenParting(600, 0, 0, None, None)
    assert found.rows_shared == 600
    assert found.bytes == Bytes(sum(ref.nbytes for ref in one.blobs()), 0, 0)
    assert found.meaning == found.making == found.sampler == found.about == ()
    assert found.layout_a == found.layout_b == ()


def test_ids_and_messages_part_where_they_do(manager: SessionManager) -> None:
    say(manager, "one", (BEGIN, HELLO), ([7, 8, 9], MORE))
    say(manager, "other", (BEGIN, HELLO), ([7, 99], LESS))
    found = diff(manager.manifest("one"), manager.manifest("other"))
    assert not found.same_conversation
    assert found.tokens == TokenParting(601, 2, 1, 8, 99)
    assert (found.messages.common, found.messages.a, found.messages.b) == (1, (MORE,), (LESS,))
    assert found.sampler == (FieldDifference("seed", 3, 5),)
    assert found.rows_shared == 600  # two whole chunks, and the piece of the same turn
    assert found.bytes is not None
    assert min(found.bytes.shared, found.bytes.own_a, found.bytes.own_b) > 0


def test_a_fork_shares_the_rows_of_its_past_up_to_its_length(manager: SessionManager) -> None:
    say(manager, "one", (BEGIN, HELLO))
    manager.fork("one", "short", 550)
    found = diff(manager.manifest("one"), manager.manifest("short"))
    assert found.tokens == TokenParting(550, 50, 0, BEGIN[550], BEGIN[550])
    assert not found.same_conversation  # though what follows in both is the same id
    assert found.rows_shared == 550
    assert found.bytes is not None
    assert found.bytes.own_b == 0


def test_fields_of_the_fingerprint_and_the_layout_are_named(
    manager: SessionManager, make_engine: MakeEngine, store: DiskStore
) -> None:
    say(manager, "one", (BEGIN, HELLO))
    quantized = SessionManager(store, make_engine(type_k="q8_0", dtype="bf16"))
    say(quantized, "other", (BEGIN, HELLO))
    found = diff(manager.manifest("one"), manager.manifest("other"))
    assert not found.same_conversation
    assert FieldDifference("type_k", "bf16", "q8_0") in found.meaning
    assert [field.field for field in found.making] == ["dtype"]
    assert {spec.dtype for spec in found.layout_a} == {"bf16"}
    assert {spec.dtype for spec in found.layout_b} == {"q8_0"}
    assert found.rows_shared == 0


def test_a_turn_is_named_by_session_number_and_pin(manager: SessionManager, store: DiskStore) -> None:
    session = say(manager, "one", (BEGIN, HELLO), ([7], MORE), ([8], LESS))
    manager.pin("one", "kept")
    assert [named_turn(store, f"one@{turn}").length for turn in (1, 2, 3)] == [600, 601, 602]
    assert named_turn(store, "one").generation == named_turn(store, session).generation == 3
    assert named_turn(store, "pin:kept").pin == "kept"
    manager.fork("one", "second")
    for absent in ("one@4", "second@2", "pin:one", "nobody"):
        with pytest.raises(SessionNotFound):
            named_turn(store, absent)
    for wrong in ("one@", "one@0", "second@0", "one@x", "one@-1", "one@²"):
        with pytest.raises(UsageError):
            named_turn(store, wrong)


def test_an_older_turn_that_gc_took_is_told_with_those_that_are_left(
    manager: SessionManager, store: DiskStore
) -> None:
    say(manager, "one", (BEGIN, HELLO), ([7], MORE), ([8], LESS))
    first = named_turn(store, "one@2").parent
    assert first is not None
    assert store.delete_blob(first, 0)
    with pytest.raises(SessionNotFound, match="its turns 2 to 3 are"):
        named_turn(store, "one@1")
