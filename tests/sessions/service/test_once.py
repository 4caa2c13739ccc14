"""A turn that is asked for again under its Idempotency-Key is said once; one that finds another waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.errors import StoreUnavailable
from serialization.limits import MAX_REPLIES
from sessions.lease import acquire
from sessions.manager import SessionManager
from sessions.policy import Policy
from sessions.restore import Reason
from sessions.service.ask import Ask
from sessions.service.backend import Backend, BackendConfig
from sessions.service.once import Once
from sessions.stores.disk import DiskStore
from tests.faults import FaultyStore
from tests.sessions.conftest import MakeEngine
from tests.sessions.service.conftest import MakeBackend
from tests.sessions.service.hearing import SHORT, T, heard, user, wait_for
from tests.sessions.service.serving import Served, events, served

SAMPLER = {"temperature": 1.0, "seed": 3}


def begin(client: httpx.Client) -> str:
    return str(client.post("/v1/sessions", json={"sampler": SAMPLER}).json()["id"])


def say(client: httpx.Client, session: str, text: str, key: str | None, **given: Any) -> httpx.Response:
    headers = {} if key is None else {"idempotency-key": key}
    if "if_match" in given:
        headers["if-match"] = given.pop("if_match")
    asked = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, **given}
    return client.post(f"/v1/sessions/{session}/messages", json=asked, headers=headers)


def texts(client: httpx.Client, session: str) -> list[str]:
    return [message["content"] for message in client.get(f"/v1/sessions/{session}").json()["messages"]]


@pytest.fixture
def two(make_backend: MakeBackend) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """Two services on one store."""
    config = BackendConfig(policy=Policy(lease=5, grace=10), patience=20)
    with ExitStack() as stack:
        backends = [make_backend(config, deterministic=True) for _ in range(2)]
        one, other = (stack.enter_context(served(backend)).client for backend in backends)
        yield one, other


def test_a_turn_that_is_asked_for_again_is_told_again_by_any_process(
    two: tuple[httpx.Client, httpx.Client],
) -> None:
    one, other = two
    session = begin(one)
    first = say(one, session, "green or black?", "a")
    for client in (one, other):
        again = say(client, session, "green or black?", "a")
        assert again.status_code == 200
        assert again.json()["reply"] == first.json()["reply"]
        assert again.headers["etag"] == first.headers["etag"]
        assert again.headers["x-tenuto-reason"] == "repeated"
        assert again.headers["x-tenuto-recomputed-tokens"] == "0"
        for same in ("session", "prompt_tokens", "save_error"):
            assert again.json()[same] == first.json()[same]
        assert again.json()["saved"]["generation"] == first.json()["saved"]["generation"]
    assert texts(one, session) == ["green or black?", first.json()["reply"]["content"]]
    asked_anew = say(other, session, "green or black?", "b")
    assert asked_anew.json()["saved"]["generation"] == first.json()["saved"]["generation"] + 1


def test_it_is_told_again_though_the_session_moved_on_and_whatever_turn_is_expected(at: Served) -> None:
    session = begin(at.client)
    tag = at.client.get(f"/v1/sessions/{session}").headers["etag"]
    first = say(at.client, session, "one", "a", if_match=tag)
    assert say(at.client, session, "one", "a", if_match=tag).status_code == 200
    later = say(at.client, session, "two", "b")
    again = say(at.client, session, "one", "a", if_match=tag)
    assert again.json()["reply"] == first.json()["reply"]
    assert again.headers["etag"] == later.headers["etag"]
    stale = say(at.client, session, "one", "c", if_match=tag)
    assert (stale.status_code, stale.json()["error"]["details"]["generation"]) == (412, 3)


def test_what_was_asked_as_json_may_be_asked_for_again_as_events(at: Served) -> None:
    session = begin(at.client)
    first = say(at.client, session, "one", "a").json()
    asked = {"messages": [{"role": "user", "content": "one"}], "max_tokens": 8, "stream": True}
    with at.client.stream(
        "POST", f"/v1/sessions/{session}/messages", json=asked, headers={"idempotency-key": "a"}
    ) as answer:
        (_, begun), (_, piece), (_, ended) = events(answer.iter_lines())
    assert begun["restored"]["reason"] == "repeated"
    assert (piece["text"], piece["finish"]) == (first["reply"]["content"], first["reply"]["finish"])
    assert ended["reply"] == first["reply"]


def test_another_request_under_the_same_key_is_refused(at: Served) -> None:
    session = begin(at.client)
    first = say(at.client, session, "one", "a")
    for other in (
        say(at.client, session, "two", "a"),
        say(at.client, session, "one", "a", max_tokens=9),
        at.client.post(f"/v1/sessions/{session}/regenerate", headers={"idempotency-key": "a"}),
    ):
        assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")
    assert texts(at.client, session) == ["one", first.json()["reply"]["content"]]
    assert say(at.client, begin(at.client), "two", "a").status_code == 200  # keys are of one session


@pytest.mark.parametrize("verb", ["regenerate", "edit"])
def test_a_turn_that_is_said_anew_or_otherwise_is_so_once(at: Served, verb: str) -> None:
    session = begin(at.client)
    say(at.client, session, "one", "a")
    body = {"max_tokens": 8, "sampler": {"seed": 4}, **({"content": "two"} if verb == "edit" else {})}
    path, headers = f"/v1/sessions/{session}/{verb}", {"idempotency-key": "b"}
    first = at.client.post(path, json=body, headers=headers)
    again = at.client.post(path, json=body, headers=headers)
    assert again.json()["reply"] == first.json()["reply"]
    assert again.headers["etag"] == first.headers["etag"]
    assert len(texts(at.client, session)) == 2
    # What was said under the first key is gone: asked for again, it is said behind the rest.
    assert say(at.client, session, "one", "a").headers["x-tenuto-reason"] != "repeated"


def test_what_is_taken_back_or_forked_is_known_by_no_key(at: Served) -> None:
    session = begin(at.client)
    say(at.client, session, "one", "a")
    fork = at.client.post(f"/v1/sessions/{session}/fork").json()["id"]
    assert say(at.client, fork, "one", "a").headers["x-tenuto-reason"] != "repeated"
    at.client.post(f"/v1/sessions/{session}/rewind")
    assert say(at.client, session, "one", "a").headers["x-tenuto-reason"] != "repeated"
    assert len(texts(at.client, session)) == 2


def test_the_last_keys_are_known_and_no_more(at: Served) -> None:
    session = begin(at.client)
    for number in range(MAX_REPLIES + 1):
        say(at.client, session, "more", str(number), max_tokens=1)
    assert say(at.client, session, "more", "1", max_tokens=1).headers["x-tenuto-reason"] == "repeated"
    assert say(at.client, session, "more", "0", max_tokens=1).headers["x-tenuto-reason"] != "repeated"


@pytest.mark.parametrize("key", ["", "x" * 256])
def test_a_key_that_is_none_is_refused(at: Served, key: str) -> None:
    assert say(at.client, begin(at.client), "one", key).status_code == 400


def test_a_reply_that_its_client_did_not_wait_for_is_said_whole_when_it_is_asked_for_again(
    two: tuple[httpx.Client, httpx.Client],
) -> None:
    one, other = two
    session, twin = begin(one), begin(one)
    whole = say(one, twin, "on", "a", max_tokens=400).json()["reply"]
    asked = {"messages": [{"role": "user", "content": "on"}], "max_tokens": 400}
    headers = {"idempotency-key": "a"}
    path = f"/v1/sessions/{session}/messages"
    with one.stream("POST", path, json={**asked, "stream": True}, headers=headers) as answer:
        next(line for line in answer.iter_lines() if line == "event: piece")
    wait_for(lambda: len(texts(other, session)) == 2)
    assert len(texts(other, session)[1]) < len(whole["content"])
    again = other.post(path, json=asked, headers=headers)
    assert again.json()["reply"] == whole
    assert texts(one, session) == ["on", whole["content"]]
    assert one.post(path, json=asked, headers=headers).headers["x-tenuto-reason"] == "repeated"


def test_a_turn_waits_for_another_one_in_its_session(two: tuple[httpx.Client, httpx.Client]) -> None:
    session = begin(two[0])
    answers: list[httpx.Response] = []

    def ask(client: httpx.Client, text: str) -> None:
        answers.append(say(client, session, text, None, max_tokens=60))

    threads = [threading.Thread(target=ask, args=(two[number % 2], f"{number}?")) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [answer.status_code for answer in answers] == [200] * 6
    said = texts(two[0], session)
    assert sorted(said[::2]) == [f"{number}?" for number in range(6)]
    assert sorted(said[1::2]) == sorted(answer.json()["reply"]["content"] for answer in answers)


def test_a_turn_goes_on_when_the_lease_of_a_dead_process_ends(
    make_backend: MakeBackend, tmp_path: Path
) -> None:
    config = BackendConfig(policy=Policy(lease=5, grace=10), patience=20)
    with served(make_backend(config)) as at:
        session = begin(at.client)
        store = DiskStore(tmp_path / "store", "default")
        dead = acquire(store, session, "a process that died", 1.0)
        answer = say(at.client, session, "one", None)
        assert answer.status_code == 200
        assert store.now() >= dead.until
        store.close()


def test_a_turn_waits_no_longer_than_it_may(make_backend: MakeBackend, tmp_path: Path) -> None:
    config = BackendConfig(policy=Policy(lease=5, grace=10), patience=0.5)
    with served(make_backend(config)) as at:
        session = begin(at.client)
        store = DiskStore(tmp_path / "store", "default")
        with acquire(store, session, "somebody else", 60.0):
            started = time.monotonic()
            answer = say(at.client, session, "one", None)
            assert (answer.status_code, answer.json()["error"]["details"]["holder"]) == (423, "somebody else")
            assert time.monotonic() - started >= 0.3
        assert say(at.client, session, "one", None).status_code == 200
        store.close()


def test_a_client_that_goes_away_while_it_waits_says_nothing(
    make_backend: MakeBackend, tmp_path: Path
) -> None:
    backend = make_backend(BackendConfig(policy=Policy(lease=5, grace=10), patience=60))
    with served(backend) as at:
        session = begin(at.client)
        store = DiskStore(tmp_path / "store", "default")
        with acquire(store, session, "somebody else", 60.0):
            with pytest.raises(httpx.ReadTimeout):
                at.client.post(
                    f"/v1/sessions/{session}/messages",
                    json={"messages": [{"role": "user", "content": "x"}]},
                    timeout=1.0,
                )
            at.logged(2)
        assert texts(at.client, session) == []
        store.close()


# --- a store that fails ---------------------------------------------------------------------------


@pytest.fixture
def faulty(tmp_path: Path) -> FaultyStore:
    return FaultyStore(DiskStore(tmp_path / "faulty", "default"))


@pytest.fixture
def unsteady(make_engine: MakeEngine, faulty: FaultyStore) -> Iterator[Served]:
    config = BackendConfig(policy=Policy(lease=5, grace=10), saving_again=0.2)
    backend = Backend(make_engine(), lambda _: faulty, config)
    with served(backend) as at:
        yield at
    faulty.plan = ""
    backend.close()


def unsaved(at: Served, store: FaultyStore, session: str) -> dict[str, Any]:
    """A turn that is said and cannot be saved."""
    asked = {"messages": [{"role": "user", "content": "on"}], "max_tokens": 40, "stream": True}
    headers = {"idempotency-key": "a"}
    with at.client.stream("POST", f"/v1/sessions/{session}/messages", json=asked, headers=headers) as answer:
        heard = events(answer.iter_lines())
        assert next(heard)[0] == "begun"
        store.plan = "." * store.num_calls + "r" * 100_000
        *_, (name, ended) = heard
    assert (name, ended["save_error"]["code"]) == ("ended", "store_unavailable")
    return dict(ended)


def test_a_turn_that_could_not_be_saved_is_saved_as_soon_as_that_is_possible(
    unsteady: Served, faulty: FaultyStore
) -> None:
    session = begin(unsteady.client)
    ended = unsaved(unsteady, faulty, session)
    faulty.plan = ""
    wait_for(lambda: len(texts(unsteady.client, session)) == 2)
    assert texts(unsteady.client, session) == ["on", ended["reply"]["content"]]
    manager = SessionManager(faulty)

    def free() -> bool:
        return faulty.read(f"lease/{session}") is None

    wait_for(free)  # whoever comes next need not come here
    assert manager.manifest(session).generation == 2


def test_a_turn_that_could_not_be_saved_is_told_again_and_then_saved(
    unsteady: Served, faulty: FaultyStore
) -> None:
    session = begin(unsteady.client)
    ended = unsaved(unsteady, faulty, session)
    answer = say(unsteady.client, session, "on", "a", max_tokens=40)
    assert answer.json()["reply"] == ended["reply"]
    assert answer.json()["save_error"]["code"] == "store_unavailable"
    faulty.plan = ""

    def told() -> httpx.Response:
        return say(unsteady.client, session, "on", "a", max_tokens=40)

    wait_for(lambda: told().json()["save_error"] is None)
    assert told().json()["reply"] == ended["reply"]
    assert texts(unsteady.client, session) == ["on", ended["reply"]["content"]]


def test_a_turn_whose_commit_was_not_answered_is_committed_once(
    unsteady: Served, faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The swap took place, and only that was not known."""
    session = begin(unsteady.client)
    real, lost = faulty.swap, [f"session/{session}"]

    def swap(name: str, *rest: Any, **more: Any) -> bool:
        done = real(name, *rest, **more)
        if name in lost:
            lost.remove(name)
            raise StoreUnavailable("nobody answered", outcome="unknown")
        return done

    monkeypatch.setattr(faulty, "swap", swap)
    answer = say(unsteady.client, session, "one", "a").json()
    assert answer["save_error"]["code"] == "store_unavailable"

    def told() -> dict[str, Any]:
        return dict(say(unsteady.client, session, "one", "a").json())

    wait_for(lambda: told()["save_error"] is None)
    assert told()["saved"]["generation"] == 2
    assert SessionManager(faulty).manifest(session).generation == 2


def test_a_turn_that_a_failover_lost_is_reported_by_its_generation(at: Served, tmp_path: Path) -> None:
    """The ref is as it was before the last turn, as a replica has it that did not hear of it."""
    session = begin(at.client)
    say(at.client, session, "one", None)
    store = DiskStore(tmp_path / "store", "default")
    before = store.read(f"session/{session}")
    lost = say(at.client, session, "two", None)
    assert store.swap(f"session/{session}", store.read(f"session/{session}"), before)
    told = say(at.client, session, "three", None)
    assert (told.status_code, told.json()["error"]["code"]) == (409, "turn_lost")
    assert told.json()["error"]["details"] == {"generation": 2, "lost": 3}
    stale = say(at.client, session, "three", None, if_match=lost.headers["etag"])
    assert (stale.status_code, stale.json()["error"]["details"]["generation"]) == (412, 2)
    assert say(at.client, session, "two", None).json()["saved"]["generation"] == 3
    assert texts(at.client, session)[::2] == ["one", "two"]
    store.close()


def test_a_turn_that_was_said_over_a_lost_one_elsewhere_does_not_hide_the_loss(
    two: tuple[httpx.Client, httpx.Client], tmp_path: Path
) -> None:
    """Both have the same generation."""
    one, other = two
    session = begin(one)
    say(one, session, "one", None)
    with closing(DiskStore(tmp_path / "store", "default")) as store:
        before = store.read(f"session/{session}")
        say(one, session, "two", None)
        assert store.swap(f"session/{session}", store.read(f"session/{session}"), before)
    assert say(other, session, "else", None).json()["saved"]["generation"] == 3
    told = say(one, session, "three", None)
    assert (told.status_code, told.json()["error"]["code"]) == (409, "turn_lost")
    assert told.json()["error"]["details"] == {"generation": 3, "lost": 3}
    assert say(one, session, "three", None).json()["saved"]["generation"] == 4
    assert texts(one, session)[::2] == ["one", "else", "three"]


def test_a_reply_that_was_cut_short_is_told_again_as_it_is_once_it_is_not_the_last(
    make_backend: MakeBackend,
) -> None:
    backend = make_backend()
    session = backend.create(T).id
    ask = Ask(max_tokens=200, once=Once.of("a", b"one"))
    said = backend.turn(T, session, user("one"), ask)
    for _ in range(3):
        next(said)
    said.close()
    heard(backend.turn(T, session, user("two"), SHORT))
    before = backend.get(T, session).messages
    begun, text, ended = heard(backend.turn(T, session, user("one"), ask))
    assert begun.restored.reason is Reason.REPEATED
    assert (text, ended.replies[0].finish) == (before[1].text, "cancelled")
    assert backend.get(T, session).messages == before
