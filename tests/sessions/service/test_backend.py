"""Turns of sessions by way of the backend: what is said, kept in memory, stored, and found again."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path

import pytest

from engine.errors import (
    ContextFull,
    LeaseHeld,
    NameRefused,
    SessionNotFound,
    StaleSession,
    UsageError,
)
from engine.state import SamplerParams
from sessions.conversation import Conversation, Reply
from sessions.lease import acquire
from sessions.manager import SessionManager
from sessions.restore import Reason
from sessions.service.ask import Ask, ChatMessage, Format
from sessions.service.backend import Backend
from sessions.service.told import Ended, Said
from sessions.stores.disk import DiskStore
from sessions.stores.memory import MemoryStore
from tests.exact.members import open_member
from tests.sessions.conftest import MakeEngine
from tests.sessions.service.conftest import MakeBackend
from tests.sessions.service.hearing import SAMPLED, SHORT, T, heard, user


def test_turns_say_what_one_conversation_says(make_backend: MakeBackend, make_engine: MakeEngine) -> None:
    backend = make_backend(deterministic=True)
    session = backend.create(T, sampler=SAMPLED, system="be brief").id
    alone = Conversation.new(
        SessionManager(MemoryStore(), make_engine(deterministic=True)),
        sampler=SAMPLED,
        system="be brief",
    )
    for text in ("hello", "and what then?", "why?"):
        begun, said, ended = heard(backend.turn(T, session, user(text), SHORT))
        assert said == "".join(piece.text for piece in alone.say(text, Reply(max_tokens=12)))
        assert (begun.session, ended.session, ended.save_error) == (session, session, None)
        assert begun.restored.recomputed == (0 if text != "hello" else begun.prompt_tokens)
    assert [m.text for m in backend.get(T, session).messages] == [m.text for m in alone.messages]


def test_a_session_goes_on_in_memory_and_says_so(make_backend: MakeBackend) -> None:
    backend = make_backend()
    session = backend.create(T).id
    first, _, ended = heard(backend.turn(T, session, user("one"), SHORT))
    assert (first.restored.reason, first.restored.restored) == (Reason.NEW, 0)
    view = backend.get(T, session)
    assert view.resident
    assert view.etag == ended.etag
    second, _, _ = heard(backend.turn(T, session, user("two"), SHORT))
    assert (second.restored.reason, second.restored.detail) == (Reason.EXACT, "in memory")
    assert second.restored.restored == view.length
    assert second.restored.recomputed == 0


def test_a_session_that_gave_way_says_the_same(make_backend: MakeBackend) -> None:
    stays, gives_way = make_backend(deterministic=True), make_backend(deterministic=True, num_seqs=2)
    said: list[list[str]] = [[], []]
    for backend, told in zip((stays, gives_way), said, strict=True):
        sessions = [backend.create(T, sampler=SAMPLED).id for _ in range(5)]
        for turn in range(3):
            for session in sessions:
                view = backend.get(T, session)
                assert view.resident == (backend is stays and turn > 0)
                begun, text, _ = heard(backend.turn(T, session, user(f"{turn} of {turn}"), SHORT))
                told.append(text)
                assert begun.restored.restored >= view.length - 1
    assert said[0] == said[1]
    assert gives_way.load().resident <= 2


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next", "gemma3"])
def test_models_that_cannot_be_cut_anywhere_stay_in_memory_too(family: str, tmp_path: Path) -> None:
    """Turns that end in the middle, edits and rewinds, with the sequence in memory and without."""
    said: list[list[str]] = []
    for number, num_seqs in enumerate((8, 1)):
        engine = open_member(family, "f32", n_ctx=1024, num_cells=4096, num_seqs=num_seqs, deterministic=True)
        backend = Backend(engine, lambda tenant, at=number: DiskStore(tmp_path / f"{at}", tenant))
        sessions = [backend.create(T, sampler=SAMPLED).id for _ in range(3)]
        told: list[str] = []
        for turn in range(2):
            for session in sessions:
                pieces = backend.turn(T, session, user(f"turn {turn}"), Ask(max_tokens=200))
                for _ in itertools.islice(pieces, 6):
                    pass
                pieces.close()
                told.append(backend.get(T, session).messages[-1].text)
        for session in sessions:
            told.append(heard(backend.regenerate(T, session, SHORT))[1])
            told.append(heard(backend.edit(T, session, "otherwise", SHORT))[1])
        for session in sessions:
            backend.rewind(T, session)
            told.append(heard(backend.turn(T, session, user("turn 1"), SHORT))[1])
        said.append(told)
        assert backend.manager(T).check().clean
        backend.close()
    assert said[0] == said[1]
    for turn in (0, 3):  # all three of them were asked the same
        assert len(set(said[0][turn : turn + 3])) == 1


def test_another_process_goes_on_where_this_one_stopped(make_backend: MakeBackend) -> None:
    one, two = make_backend(deterministic=True), make_backend(deterministic=True)
    session = one.create(T, sampler=SAMPLED).id
    alone = one.create(T, sampler=SAMPLED).id
    for turn in range(4):
        backend = (one, two)[turn % 2]
        _, text, _ = heard(backend.turn(T, session, user(f"turn {turn}"), SHORT))
        assert text == heard(one.turn(T, alone, user(f"turn {turn}"), SHORT))[1]


def test_what_was_read_of_a_reply_that_is_closed_early_is_kept(make_backend: MakeBackend) -> None:
    backend = make_backend()
    session = backend.create(T).id
    told = backend.turn(T, session, user("tell me everything"), Ask(max_tokens=200))
    for _ in range(6):
        next(told)
    told.close()  # type: ignore[attr-defined]
    view = backend.get(T, session)
    assert [m.role for m in view.messages] == ["user", "assistant"]
    prompt = view.messages[0].stop
    assert view.messages[1].stop - prompt == 5
    assert heard(backend.turn(T, session, user("and?"), SHORT))[0].restored.recomputed == 0


def test_a_reply_is_cancelled_from_elsewhere(make_backend: MakeBackend) -> None:
    backend, gone = make_backend(), threading.Event()
    session = backend.create(T).id
    texts = []
    for each in backend.turn(T, session, user("go on for ever"), Ask(max_tokens=1500, cancel=gone.is_set)):
        texts.append(each)
        if len(texts) == 5:
            gone.set()
    ended = texts[-1]
    assert isinstance(ended, Ended)
    assert ended.replies[0].finish == "cancelled"
    assert ended.etag == backend.get(T, session).etag


def test_a_stale_turn_is_refused_and_nothing_is_taken(make_backend: MakeBackend) -> None:
    backend = make_backend()
    session = backend.create(T).id
    old = backend.get(T, session).etag
    now = heard(backend.turn(T, session, user("one"), SHORT))[2].etag
    with pytest.raises(StaleSession):
        list(backend.turn(T, session, user("two"), Ask(expected=old)))
    view = backend.get(T, session)
    assert (view.etag, len(view.messages), view.resident) == (now, 2, True)
    heard(backend.turn(T, session, user("two"), Ask(max_tokens=3, expected=now)))


def test_a_session_that_is_held_says_by_whom(make_backend: MakeBackend, tmp_path: Path) -> None:
    backend = make_backend()
    session = backend.create(T).id
    with (
        acquire(DiskStore(tmp_path / "store", T), session, "somebody else", 30),
        pytest.raises(LeaseHeld, match="somebody else") as refused,
    ):
        list(backend.turn(T, session, user("one"), SHORT))
    assert refused.value.details["holder"] == "somebody else"
    told = backend.turn(T, session, user("one"), Ask(max_tokens=100))
    next(told)
    with pytest.raises(LeaseHeld):  # nor do two turns of one process run in it
        list(backend.turn(T, session, user("two"), SHORT))
    told.close()  # type: ignore[attr-defined]
    heard(backend.turn(T, session, user("two"), SHORT))


def test_what_cannot_be_taken_leaves_the_session_as_it_was(make_backend: MakeBackend) -> None:
    backend = make_backend(n_ctx=128)
    session = backend.create(T).id
    heard(backend.turn(T, session, user("one"), SHORT))
    before = backend.get(T, session)
    with pytest.raises(ContextFull):
        list(backend.turn(T, session, user("x" * 500), SHORT))
    with pytest.raises(ContextFull):
        list(backend.edit(T, session, "x" * 500, SHORT))
    with pytest.raises(UsageError):
        list(backend.turn(T, session, [], SHORT))
    with pytest.raises(UsageError):
        list(backend.turn(T, session, user("x"), Ask(num_replies=0)))
    with pytest.raises(SessionNotFound):
        list(backend.turn(T, "no-such", user("x"), SHORT))
    with pytest.raises(NameRefused):
        list(backend.turn(T, "../x", user("x"), SHORT))
    after = backend.get(T, session)
    assert (after.etag, after.messages) == (before.etag, before.messages)
    begun, _, _ = heard(backend.turn(T, session, user("two"), SHORT))
    assert begun.restored.recomputed == 0


def test_regenerate_and_edit(make_backend: MakeBackend) -> None:
    backend = make_backend(deterministic=True)
    session = backend.create(T, sampler=SAMPLED).id
    heard(backend.turn(T, session, user("one"), SHORT))
    _, two, _ = heard(backend.turn(T, session, user("two"), SHORT))
    begun, again, _ = heard(backend.regenerate(T, session, SHORT))
    assert again == two
    assert begun.restored.recomputed == 0
    assert begun.restored.restored <= begun.prompt_tokens  # nothing of the reply that was taken back
    other = SamplerParams(temperature=1.0, seed=6)
    assert heard(backend.regenerate(T, session, Ask(max_tokens=12, sampler=other)))[1] != two
    first = backend.get(T, session).messages[1]
    begun, _, _ = heard(backend.edit(T, session, "three", SHORT))
    assert (begun.restored.restored, begun.restored.recomputed) == (first.stop, 0)
    view = backend.get(T, session)
    assert [m.text for m in view.messages if m.role == "user"] == ["one", "three"]
    assert len(view.messages) == 4
    with pytest.raises(UsageError):
        list(backend.regenerate(T, backend.create(T).id, SHORT))


def test_fork_and_rewind(make_backend: MakeBackend) -> None:
    backend = make_backend(deterministic=True)
    session = backend.create(T, sampler=SAMPLED).id
    texts = [heard(backend.turn(T, session, user(text), SHORT))[1] for text in ("one", "two", "three")]
    fork = backend.fork(T, session, "branch")
    assert (fork.parent, fork.name, len(fork.messages)) == (session, "branch", 6)
    begun, _, _ = heard(backend.turn(T, "branch", user("four"), SHORT))
    assert (begun.restored.reason, begun.restored.detail) == (Reason.EXACT, "in memory")
    assert heard(backend.turn(T, session, user("four"), SHORT))[0].restored.detail == "in memory"
    short = backend.fork(T, session, turns_back=3)
    assert [m.text for m in short.messages] == ["one", texts[0]]
    assert heard(backend.turn(T, short.id, user("two"), SHORT))[1] == texts[1]
    view, result = backend.rewind(T, session, 2)
    assert (result.reason, result.recomputed, len(view.messages)) == (Reason.EDITED, 0, 4)
    begun, said, _ = heard(backend.turn(T, session, user("three"), SHORT))
    assert (begun.restored.detail, begun.restored.recomputed, said) == ("in memory", 0, texts[2])
    with pytest.raises(StaleSession):
        backend.rewind(T, session, 1, view.etag)
    with pytest.raises(UsageError):
        backend.rewind(T, session, 9)


def test_sessions_are_listed_renamed_and_deleted(make_backend: MakeBackend) -> None:
    backend = make_backend()
    views = [backend.create(T, f"name-{number}", title=f"title {number}") for number in range(5)]
    page = backend.list(T, 2)
    assert [view.id for view in page.sessions] == [views[4].id, views[3].id]
    rest = backend.list(T, 100, page.after)
    assert [view.id for view in rest.sessions] == [views[2].id, views[1].id, views[0].id]
    assert rest.after is None
    assert [view.name for view in backend.list(T, containing="TITLE 3").sessions] == ["name-3"]
    assert backend.list(T, 3, containing="nothing").sessions == ()
    for limit, after in ((0, None), (101, None), (5, "../")):
        with pytest.raises(UsageError):
            backend.list(T, limit, after)
    heard(backend.turn(T, "name-1", user("one"), SHORT))
    renamed = backend.rename(T, "name-1", "other")
    assert (renamed.name, renamed.id) == ("other", views[1].id)
    assert heard(backend.turn(T, "other", user("two"), SHORT))[0].restored.detail == "in memory"
    with pytest.raises(SessionNotFound):
        backend.get(T, "name-1")
    with pytest.raises(StaleSession):
        backend.delete(T, "other", renamed.etag)
    backend.delete(T, "other")
    with pytest.raises(SessionNotFound):
        backend.get(T, views[1].id)
    assert len(backend.list(T).sessions) == 4


def test_sessions_move_as_archives(make_backend: MakeBackend, tmp_path: Path) -> None:
    backend = make_backend(deterministic=True)
    session = backend.create(T, sampler=SAMPLED).id
    heard(backend.turn(T, session, user("one"), SHORT))
    with (tmp_path / "a.tenuto").open("wb") as out:
        assert backend.export(T, session, out).nbytes > 0
    with (tmp_path / "a.tenuto").open("rb") as source:
        other = backend.import_("another", source, "came")
    assert (
        heard(backend.turn("another", "came", user("two"), SHORT))[1]
        == (heard(backend.turn(T, session, user("two"), SHORT))[1])
    )
    assert other.messages[0].text == "one"


def test_pins_keep_turns(make_backend: MakeBackend) -> None:
    backend = make_backend()
    session = backend.create(T).id
    heard(backend.turn(T, session, user("one"), SHORT))
    assert backend.pin(T, session, "here").name == "here"
    heard(backend.turn(T, session, user("two"), SHORT))
    assert len(backend.load_pin(T, "here").messages) == 2
    assert [pin.name for pin in backend.manager(T).pins()] == ["here"]
    backend.manager(T).unpin("here")
    assert list(backend.manager(T).pins()) == []


def test_messages_are_amended_without_a_reply(make_backend: MakeBackend) -> None:
    backend = make_backend(deterministic=True)
    session = backend.create(T, sampler=SAMPLED, note="first").id
    assert backend.get(T, session).note == "first"
    heard(backend.turn(T, session, user("one"), SHORT))
    said = [ChatMessage(m.role, m.text) for m in backend.get(T, session).messages]
    view = backend.amend(T, session, [*said, ChatMessage("user", "two"), ChatMessage("assistant", "2")], "n")
    assert (view.note, [m.text for m in view.messages[2:]]) == ("n", ["two", "2"])
    begun, _, _ = heard(backend.turn(T, session, user("three"), SHORT))
    assert (begun.restored.detail, begun.restored.recomputed) == ("in memory", 0)
    assert backend.get(T, session).note == "n"
    backend.amend(T, session, said[:1], None)
    begun, _, _ = heard(backend.turn(T, session, user("two"), SHORT))
    assert [m.text for m in backend.get(T, session).messages[:2]] == ["one", "two"]


def test_several_replies_to_one_prompt(make_backend: MakeBackend) -> None:
    backend = make_backend(deterministic=True)
    session = backend.create(T, sampler=SAMPLED).id
    *said, ended = backend.turn(T, session, user("one"), Ask(max_tokens=8, num_replies=3))
    assert isinstance(ended, Ended)
    assert len({reply.text for reply in ended.replies}) == 3
    for index, reply in enumerate(ended.replies):
        pieces = [each.piece for each in said if isinstance(each, Said) and each.reply == index]
        assert "".join(piece.text for piece in pieces) == reply.text
        assert (len(pieces), pieces[-1].finish) == (reply.num_tokens, reply.finish)
    assert backend.get(T, session).messages[-1].text == ended.replies[0].text
    again = backend.create(T, sampler=SAMPLED).id
    assert heard(backend.turn(T, again, user("one"), Ask(max_tokens=8)))[1] == ended.replies[0].text


def test_likelihoods_and_json_are_told(make_backend: MakeBackend) -> None:
    backend = make_backend()
    session = backend.create(T).id
    pieces = [
        each.piece
        for each in backend.turn(T, session, user("one"), Ask(max_tokens=5, logprobs=3))
        if isinstance(each, Said)
    ]
    assert all(piece.logprobs is not None and len(piece.logprobs.top) == 3 for piece in pieces)
    _, text, ended = heard(
        backend.turn(T, session, user("two"), Ask(max_tokens=400, format=Format.JSON_OBJECT))
    )
    if ended.replies[0].finish == "eos":
        assert isinstance(json.loads(text), dict)
    else:
        assert text.lstrip().startswith("{")


def test_words(make_backend: MakeBackend) -> None:
    backend = make_backend()
    ids = backend.tokenize("<|im_end|>the")
    assert backend.detokenize(ids) == "<|im_end|>the"
    assert len(backend.tokenize("<|im_end|>the", special=True)) < len(ids)
    assert backend.token_bytes(ids[-1]) in (b"e", b"the")
    with pytest.raises(UsageError):
        backend.detokenize([10**9])
    session = backend.create(T).id
    assert (
        backend.count(user("hello")) == heard(backend.turn(T, session, user("hello"), SHORT))[0].prompt_tokens
    )
