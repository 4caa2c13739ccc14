"""Stateless calls find their past, by what was said, by its tokens, in memory or stored; and say as much."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from engine.errors import ContextFull, SessionNotFound, UsageError
from engine.state import SamplerParams
from sessions.names import new_session_id
from sessions.restore import Reason
from sessions.service.ask import Ask, ChatMessage, Keep, Own
from sessions.service.backend import Backend
from sessions.service.told import Begun, Ended
from tests.sessions.service.conftest import MakeBackend
from tests.sessions.service.hearing import SAMPLED, SHORT, T, heard, user

ASK = Ask(max_tokens=12, sampler=SAMPLED)
LONG = "a long beginning that many conversations have in common. " * 8


def talk(
    backend: Backend, messages: list[ChatMessage], text: str, ask: Ask = ASK, keep: Keep = Keep.PAST
) -> tuple[Begun, Ended, list[ChatMessage]]:
    """One call, as a client makes it that keeps the conversation itself."""
    asked = [*messages, ChatMessage("user", text)]
    begun, said, ended = heard(backend.complete(T, asked, ask, keep))
    return begun, ended, [*asked, ChatMessage("assistant", said)]


def test_each_call_finds_the_one_before_in_memory(make_backend: MakeBackend) -> None:
    backend = make_backend(deterministic=True)
    begun, first, said = talk(backend, [], "hello")
    assert (begun.restored.reason, begun.restored.restored) == (Reason.NEW, 0)
    length = backend.get(T, first.session or "").length
    for text in ("and then?", "why?"):
        begun, ended, said = talk(backend, said, text)
        assert begun.restored.restored >= length - 1
        assert begun.restored.restored + begun.restored.recomputed == begun.prompt_tokens
        assert ended.session == first.session  # one conversation is one session
        length = backend.get(T, first.session or "").length
    assert len(backend.list(T).sessions) == 1
    view = backend.get(T, first.session or "")
    assert [m.text for m in view.messages] == [m.text for m in said]
    assert view.title == "hello"


def test_a_call_after_a_restart_finds_it_in_the_store_and_says_the_same(make_backend: MakeBackend) -> None:
    stays, comes = make_backend(deterministic=True), make_backend(deterministic=True)
    _, _, said = talk(stays, [], "hello")
    _, _, more = talk(stays, said, "and then?")
    begun, _, again = talk(comes, said, "and then?")  # the other one went on meanwhile, this one goes its way
    assert again == more
    assert begun.restored.restored > 20
    begun, _, _ = talk(comes, more, "why?")
    assert begun.restored.restored > 20


def test_a_common_beginning_is_shared(make_backend: MakeBackend) -> None:
    backend, later = make_backend(), make_backend()
    talk(backend, [ChatMessage("system", LONG)], "one")
    begun, _, _ = talk(backend, [ChatMessage("system", LONG)], "two")
    assert begun.restored.reason is Reason.PREFIX
    assert begun.restored.restored > 400
    begun, _, _ = talk(later, [ChatMessage("system", LONG)], "three")  # by the index of the store
    assert begun.restored.reason is Reason.PREFIX
    assert begun.restored.restored > 400


def test_another_reply_to_an_earlier_message_leaves_the_session_as_it_is(make_backend: MakeBackend) -> None:
    backend = make_backend()
    _, first, one = talk(backend, [], "hello")
    _, _, two = talk(backend, one, "and then?")
    begun, other, _ = talk(backend, one, "something else")
    assert begun.restored.restored >= len(backend.tokenize("hello"))
    assert other.session != first.session
    assert [m.text for m in backend.get(T, first.session or "").messages] == [m.text for m in two]


def test_the_same_conversation_is_stored_once(make_backend: MakeBackend) -> None:
    backend = make_backend(deterministic=True)
    sessions = {talk(backend, [], "hello")[1].session for _ in range(3)}
    assert len(sessions) == 1
    assert len(backend.list(T).sessions) == 1


def test_what_is_not_to_be_kept_is_nowhere(make_backend: MakeBackend) -> None:
    backend = make_backend()
    before = backend.usage(T)
    _, ended, said = talk(backend, [], LONG, keep=Keep.NOTHING)
    assert (ended.session, ended.etag, ended.saved) == (None, None, None)
    assert backend.usage(T) == before
    assert backend.list(T).sessions == ()
    begun, _, _ = talk(backend, said, "more", keep=Keep.NOTHING)
    assert (begun.restored.reason, begun.restored.restored) == (Reason.NEW, 0)
    begun, _, _ = talk(backend, [], LONG, replace(ASK, num_replies=2), Keep.NOTHING)
    assert begun.restored.restored == 0


def test_a_response_is_a_session_of_its_own_and_parents_have_many(make_backend: MakeBackend) -> None:
    backend = make_backend(deterministic=True)
    _, first, said = talk(backend, [], LONG, keep=Keep.SESSION)
    children = []
    for text in ("left", "right", "left"):
        asked = [*said, ChatMessage("user", text)]
        own = Own(new_session_id(), lambda begun, spoken: f"{begun.prompt_tokens} {spoken[0].num_tokens}")
        begun, reply, ended = heard(backend.complete(T, asked, ASK, Keep.SESSION, first.session, own))
        assert begun.session == ended.session == own.id
        assert begun.restored.restored > 400
        view = backend.get(T, own.id)
        note = f"{begun.prompt_tokens} {ended.replies[0].num_tokens}"
        assert (view.parent, view.note) == (first.session, note)
        assert view.messages[-1].text == reply
        children.append(reply)
    assert children[0] == children[2]
    assert [m.text for m in backend.get(T, first.session or "").messages] == [m.text for m in said]
    with pytest.raises(SessionNotFound):
        list(backend.complete(T, user("x"), ASK, Keep.SESSION, new_session_id()))


def test_a_childs_save_writes_what_is_new(make_backend: MakeBackend) -> None:
    backend = make_backend()
    _, first, said = talk(backend, [], LONG * 4, keep=Keep.SESSION)
    asked = [*said, ChatMessage("user", "more")]
    _, _, child = heard(backend.complete(T, asked, ASK, Keep.SESSION, first.session))
    assert first.saved is not None
    assert child.saved is not None
    assert child.saved.bytes_written < first.saved.bytes_written / 2
    assert backend.manager(T).check().clean


def test_instructions_that_change_are_read_anew(make_backend: MakeBackend) -> None:
    backend, fresh = make_backend(deterministic=True), make_backend(deterministic=True)
    _, first, said = talk(backend, [ChatMessage("system", "be brief")], "hello", keep=Keep.SESSION)
    asked = [ChatMessage("system", "be verbose"), *said[1:], ChatMessage("user", "more")]
    _, reply, _ = heard(backend.complete(T, asked, ASK, Keep.SESSION, first.session))
    assert reply == heard(fresh.complete("another", asked, ASK, Keep.NOTHING))[1]


def test_tenants_and_salts_find_nothing_of_each_other(make_backend: MakeBackend) -> None:
    backend = make_backend()
    asked = user(LONG)
    _, said, _ = heard(backend.complete("a", asked, ASK))
    more = [*asked, ChatMessage("assistant", said), ChatMessage("user", "more")]
    salted = replace(ASK, salt="s")
    for tenant, ask in (("b", ASK), ("a", salted), ("b", salted)):
        begun, _, _ = heard(backend.complete(tenant, more, ask, Keep.NOTHING))
        assert (begun.restored.reason, begun.restored.restored) == (Reason.NEW, 0), (tenant, ask.salt)
    heard(backend.complete("a", asked, salted))
    begun, _, _ = heard(backend.complete("a", more, salted, Keep.NOTHING))
    assert begun.restored.restored > 400
    begun, _, _ = heard(backend.complete("a", more, ASK, Keep.NOTHING))
    assert begun.restored.restored > 400


def test_what_is_said_does_not_depend_on_what_was_reused(make_backend: MakeBackend) -> None:
    """In deterministic mode, of the same ids: what was sampled is not always what its text is tokenized
    to."""
    backend, fresh = make_backend(deterministic=True), make_backend(deterministic=True, num_seqs=1)
    said: list[ChatMessage] = []
    for turn in range(4):
        asked = [*said, ChatMessage("user", f"turn {turn} {LONG}")]
        _, reply, _ = heard(backend.complete(T, asked, ASK))
        _, alone, _ = heard(fresh.complete("nobody", asked, ASK, Keep.NOTHING))
        assert reply == alone
        said = [*asked, ChatMessage("assistant", f"said by who asks: {turn}")]


def test_a_call_that_is_cut_short_leaves_nothing(make_backend: MakeBackend) -> None:
    backend = make_backend()
    told = backend.complete(T, user("hello"), Ask(max_tokens=300))
    for _ in range(4):
        next(told)
    told.close()  # type: ignore[attr-defined]
    assert backend.list(T).sessions == ()
    assert backend.load().running == 0
    heard(backend.complete(T, user("hello"), SHORT))


def test_what_makes_no_call(make_backend: MakeBackend) -> None:
    backend = make_backend(n_ctx=64)
    with pytest.raises(UsageError):
        list(backend.complete(T, []))
    with pytest.raises(ContextFull):
        list(backend.complete(T, user("x" * 200)))
    with pytest.raises(UsageError):
        list(backend.complete(T, user("x"), Ask(logprobs=21)))
    heard(backend.complete(T, user("x"), SHORT))


def test_calls_of_many_threads_on_one_past(make_backend: MakeBackend) -> None:
    backend = make_backend(deterministic=True)
    _, _, said = talk(backend, [], LONG)
    samplers = [SamplerParams(temperature=1.0, seed=seed) for seed in range(4)]

    def call(sampler: SamplerParams) -> str:
        return talk(backend, said, "and then?", Ask(max_tokens=12, sampler=sampler))[2][-1].text

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(call, samplers))
    assert together == [call(sampler) for sampler in samplers]
    assert len(set(together)) == 4
