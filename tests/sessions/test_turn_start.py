"""What a long reply makes windows forget can be said otherwise all the same, from a copy on the device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ContextFull, NoSlot, StoreUnavailable
from engine.runner import Engine
from engine.state import SamplerParams
from engine.template import template_for
from sessions.conversation import Conversation, Reply
from sessions.manager import SessionManager
from sessions.restore import Reason
from sessions.session import SaveResult, Session
from sessions.stores.memory import MemoryStore
from tests.exact.members import open_member
from tests.sessions.conftest import MakeEngine

SHORT, LONG, LONGER = Reply(max_tokens=5), Reply(max_tokens=150), Reply(max_tokens=300)
#: a reply that goes on until it is stopped
SAMPLER = SamplerParams(logit_bias=tuple((token, float("-inf")) for token in (257, 258, 259)))


@pytest.fixture(autouse=True)
def small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that have dropped what they can after a hundred tokens."""
    monkeypatch.setattr("engine.cache.iswa.SLACK", 1)
    monkeypatch.setattr("engine.cache.iswa.PAD", 16)


@pytest.fixture
def make_windowed(make_engine: MakeEngine, windowed_path: Path) -> MakeEngine:
    def make(**settings: object) -> Engine:
        sizes = {"n_ctx": 1024, "num_cells": 1024, "num_seqs": 1, "max_batch": 16, "max_ubatch": 16}
        return make_engine(windowed_path, **{**sizes, **settings})

    return make


def hear(pieces: Iterator[object]) -> list[int]:
    return [piece.token for piece in pieces if piece.token is not None]  # type: ignore[attr-defined]


def begun(engine: Engine, store: MemoryStore | None = None, turns: int = 2) -> Conversation:
    """A conversation of some short turns, and a long last one."""
    chat = Conversation.new(SessionManager(store or MemoryStore(), engine), sampler=SAMPLER)
    for turn in range(turns - 1):
        hear(chat.say(f"turn {turn}, in a few words", SHORT))
    return chat


def copied(chat: Conversation) -> int:
    """How many tokens the copy has; 0 without one."""
    start = chat._live._turn_start
    assert start is not None
    return start.length


def digest(chat: Conversation) -> str:
    """Of every row that going on needs, and the ids."""
    state = chat._engine.snapshot(chat._live.seq)
    found = hashlib.blake2b(repr((state.tokens, state.edge, state.sampler)).encode())
    for run in state.rows:
        for part in run.parts:
            found.update(part[-32 if run.kind == "window" else 0 :].numpy().tobytes())
    for part in state.points[-1].parts if state.points else ():
        found.update(part.numpy().tobytes())
    return found.hexdigest()


def test_a_turn_that_outgrew_its_window_is_taken_back_from_the_copy(make_windowed: MakeEngine) -> None:
    chat = begun(make_windowed())
    before, ids = digest(chat), chat.ids
    hear(chat.say("and now the long one", LONG))
    assert not chat._engine.can_resume_at(chat._live.seq, len(ids) - 1), "the window has gone on"
    result = chat.rewind()
    assert (result.reason, result.restored, result.recomputed) == (Reason.EDITED, len(ids), 0)
    assert result.detail == "from the copy on the device that was made when the turn began"
    assert (chat.ids, digest(chat)) == (ids, before)


def test_regenerate_and_edit_read_nothing_of_the_past_again(make_windowed: MakeEngine) -> None:
    engine = make_windowed()
    chat = begun(engine)
    first = hear(chat.say("and now the long one", LONG))
    fed: list[int] = []
    advance = engine.advance

    def counting(work, *rest):  # type: ignore[no-untyped-def]
        fed.extend(token for tokens in work.values() for token in tokens)
        return advance(work, *rest)

    engine.advance = counting  # type: ignore[method-assign]
    assert hear(chat.regenerate(LONG)) == first
    assert chat.reused is None
    assert len(fed) < 2 * len(first)
    other = hear(chat.edit("and now another", LONG))
    assert chat.reused is None
    assert hear(chat.edit("and now the long one", LONG)) == first
    assert hear(chat.edit("and now another", LONG)) == other


@pytest.mark.parametrize("family", ["gemma3", "dots3_note", "deepseek_v4", "recurrent_gemma"])
def test_every_member_with_windows_goes_back_exactly(family: str) -> None:
    """Where a checkpoint is no way back: what it needs of its window is gone."""
    sizes = {"n_ctx": 1024, "num_cells": 1024, "num_seqs": 1, "max_batch": 16, "max_ubatch": 16}
    chat = begun(open_member(family, "q8_0", **sizes))
    assert chat._engine.drops_rows
    before, ids = digest(chat), chat.ids
    first = hear(chat.say("and now the long one", LONG))
    assert not chat._engine.can_resume_at(chat._live.seq, len(ids) - 1)
    assert chat.rewind().detail.startswith("from the copy")
    assert (chat.ids, digest(chat)) == (ids, before)
    assert hear(chat.say("and now the long one", LONG)) == first


def test_without_room_for_a_copy_it_is_read_again_and_said(make_windowed: MakeEngine) -> None:
    """The store is no way back either: the reply filled the run of tokens that it began in, so that all of
    that was stored anew, without what the reply had made memory forget."""
    chat = begun(make_windowed(device_state_bytes=1000))
    ids = chat.ids
    hear(chat.say("and now the long one", LONGER))
    result = chat.rewind()
    assert (result.reason, result.restored, result.recomputed) == (Reason.NO_CHECKPOINT, 1, len(ids) - 1)
    assert chat.ids == ids
    hear(chat.say("and now the long one", LONGER))
    hear(chat.regenerate(LONGER))
    assert chat.reused is not None
    assert (chat.reused.reason, chat.reused.recomputed) == (Reason.NO_CHECKPOINT, len(ids) - 1)


def test_without_room_for_a_copy_the_store_is_the_way_back_to_what_was_stored_apart(
    make_windowed: MakeEngine,
) -> None:
    """A reply that goes on inside of a run of tokens is stored as a piece, and the one before it stays."""
    chat = begun(make_windowed(device_state_bytes=1000))
    ids, before = chat.ids, digest(chat)
    first = hear(chat.say("and now the long one", LONG))
    result = chat.rewind()
    assert (result.reason, result.recomputed, result.detail) == (Reason.EDITED, 0, "from the store")
    assert (chat.ids, digest(chat)) == (ids, before)
    assert hear(chat.say("and now the long one", LONG)) == first


def test_what_comes_from_the_store_is_said_to() -> None:
    manager = SessionManager(MemoryStore(), open_member("falcon_h1", "f32"))
    chat = Conversation.new(manager, sampler=SAMPLER)
    for text in ("one", "two"):
        hear(chat.say(text, SHORT))
    chat.close()
    elsewhere = SessionManager(manager.store, open_member("falcon_h1", "f32", checkpoint_bytes=0))
    again = Conversation.open(elsewhere, chat.session.id)
    result = again.rewind()
    assert (result.reason, result.recomputed, result.detail) == (Reason.EDITED, 0, "from the store")


def test_after_going_back_the_session_is_stored_and_resumed_exactly(make_windowed: MakeEngine) -> None:
    store = MemoryStore()
    chat = begun(make_windowed(), store, turns=3)
    hear(chat.say("and now the long one", LONG))
    chat.rewind()
    hear(chat.say("once more, and longer", LONG))
    hear(chat.edit("and yet again", SHORT))
    live = digest(chat)
    chat.close()
    manager = SessionManager(store, make_windowed())
    again = Conversation.open(manager, chat.session.id)
    assert again.restored is not None
    assert (again.restored.reason, again.restored.recomputed) == (Reason.EXACT, 0)
    assert digest(again) == live
    assert manager.check().clean


def test_one_copy_a_turn_is_made_and_none_is_left(
    make_windowed: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_windowed()
    taken: list[int] = []
    snapshot = engine.device_snapshot
    monkeypatch.setattr(engine, "device_snapshot", lambda seq: (taken.append(seq), snapshot(seq))[1])
    chat = begun(engine)
    assert not taken, "the first turn begins with nothing"
    hear(chat.say("and now the long one", LONG))
    assert len(taken) == 1
    hear(chat.regenerate(LONG))
    hear(chat.regenerate(LONG))
    assert len(taken) == 1, "it begins where it began"
    hear(chat.say("on", SHORT))
    assert len(taken) == 2
    assert len(engine._device_states._kept) == 1
    chat.close()
    assert engine._device_states.nbytes() == 0


def test_models_that_can_be_cut_back_make_no_copies(
    make_engine: MakeEngine, make_windowed: MakeEngine
) -> None:
    for engine in (make_engine(), make_windowed(full_windows=True), make_windowed(n_ctx=96, num_cells=96)):
        chat = begun(engine)
        hear(chat.say("on", SHORT))
        assert not engine.drops_rows
        assert engine._device_states._generation == 0
        assert chat.rewind().detail == ""


def test_a_turn_that_memory_still_has_is_cut_there(make_windowed: MakeEngine) -> None:
    chat = begun(make_windowed())
    ids = chat.ids
    hear(chat.say("a short one", SHORT))
    assert copied(chat)
    result = chat.rewind()
    assert (result.reason, result.recomputed, result.detail, chat.ids) == (Reason.EDITED, 0, "", ids)


def test_a_message_that_is_not_taken_leaves_the_long_turn_as_it_was(make_windowed: MakeEngine) -> None:
    chat = begun(make_windowed(n_ctx=400, num_cells=400))
    first = hear(chat.say("and now the long one", LONG))
    ids, messages = chat.ids, chat.messages
    with pytest.raises(ContextFull):
        hear(chat.edit("far too long " * 100, LONG))
    assert (chat.ids, chat.messages) == (ids, messages)
    assert hear(chat.regenerate(LONG)) == first
    assert chat.reused is None


def test_turns_before_the_last_are_taken_back_without_it(make_windowed: MakeEngine) -> None:
    chat = begun(make_windowed(), turns=3)
    hear(chat.say("and now the long one", LONG))
    before = chat.messages[2].start
    result = chat.rewind(2)
    assert (result.reason, result.recomputed) == (Reason.NO_CHECKPOINT, before - 1)
    assert len(chat.ids) == before
    assert copied(chat) == 0
    hear(chat.say("and now the long one", LONG))
    assert chat.rewind().detail.startswith("from the copy")


def test_where_a_template_rewrites_the_past_the_turn_begins_behind_what_is_left_of_it(
    make_windowed: MakeEngine,
) -> None:
    engine = make_windowed()
    chat = begun(engine, turns=3)
    chat._live._template = template_for(
        engine.tokenizer,
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if loop.index != 3 else 'changed' }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )
    first = hear(chat.say("and now the long one", LONG))
    assert chat.reused is not None
    assert chat.reused.reason is Reason.TEMPLATE_DIVERGED
    assert copied(chat) == chat.messages[4].start - 1
    assert hear(chat.regenerate(LONG)) == first
    assert chat.reused is None, "what it changed is not changed again"
    assert "changed" in engine.tokenizer.decode(chat.ids)


def test_another_sampler_is_kept_when_a_turn_is_taken_back(make_windowed: MakeEngine) -> None:
    chat = begun(make_windowed())
    hear(chat.say("and now the long one", LONG))
    other = SamplerParams(temperature=1.3, seed=9, logit_bias=SAMPLER.logit_bias)
    chat.resample(other)
    hear(chat.regenerate(LONG))
    assert chat._engine.sampler(chat._live.seq) == other


def test_a_copy_that_finds_no_cells_is_no_way_back(
    make_windowed: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_windowed()
    chat = begun(engine)
    ids = chat.ids
    hear(chat.say("and now the long one", LONGER))
    monkeypatch.setattr(engine, "device_restore", crowded)
    result = chat.rewind()
    assert (result.reason, chat.ids) == (Reason.NO_CHECKPOINT, ids)
    assert copied(chat) == 0, "its rows were read again: they are not those of the copy"


def test_a_copy_that_went_with_its_sequence_is_not_asked_again(
    make_windowed: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The long turn could not be saved, so the store still has the one before; it is gone back to from there,
    in a sequence of its own."""
    engine = make_windowed()
    chat = begun(engine)
    before, ids = digest(chat), chat.ids

    def away(*_: object, **__: object) -> None:
        raise StoreUnavailable("away")

    with monkeypatch.context() as patched:
        patched.setattr(SessionManager, "save", away)
        hear(chat.say("and now the long one", LONG))
    with monkeypatch.context() as patched:
        patched.setattr(engine, "device_restore", crowded)
        assert chat.rewind().detail == "from the store"
    assert (chat.ids, digest(chat)) == (ids, before)
    hear(chat.say("and now the long one", LONG))
    assert chat.rewind().detail.startswith("from the copy")
    assert (chat.ids, digest(chat)) == (ids, before)


def test_rows_behind_the_copy_do_not_count_as_stored(
    make_windowed: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = begun(make_windowed())
    length = chat._engine.length(chat._live.seq)
    hear(chat.say("and now the long one", LONG))
    synced: list[int] = []
    save = SessionManager.save

    def saving(manager: SessionManager, session: Session, *rest: Any) -> SaveResult:
        synced.append(session.synced)
        return save(manager, session, *rest)

    monkeypatch.setattr(SessionManager, "save", saving)
    chat.rewind()
    assert synced == [length]


def test_a_conversation_that_starts_over_has_no_copy(make_windowed: MakeEngine) -> None:
    chat = begun(make_windowed())
    hear(chat.say("and now the long one", LONG))
    chat.rewind(2)
    assert (chat.ids, copied(chat)) == ((), 0)
    assert chat._engine._device_states.nbytes() == 0


def crowded(*_: object) -> None:
    raise NoSlot("no cells")
