"""A Redis server that comes back empty, or evicts: what is gone is read again, or refused as expired."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
import redis

from sessions.names import new_session_id
from sessions.policy import Policy
from sessions.service.backend import Backend, BackendConfig
from sessions.stores.base import tenant_key
from sessions.stores.open import open_store
from tests.redis_server import RedisServer
from tests.sessions.conftest import MakeEngine
from tests.sessions.service.serving import served

pytestmark = pytest.mark.redis

PREFIX = f"tenuto:{{{tenant_key('default')}}}:"
CONFIG = BackendConfig(policy=Policy(lease=5, grace=10), patience=0.5, saving_again=0.2)
WORDS = {"max_tokens": 8}

Worker = Callable[[], httpx.Client]


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def worker(server: RedisServer, make_engine: MakeEngine) -> Iterator[Worker]:
    """One more service on that server, with nothing in its memory."""
    with ExitStack() as stack:

        def make() -> httpx.Client:
            backend = Backend(
                make_engine(deterministic=True), lambda tenant: open_store(server.url, tenant), CONFIG
            )
            stack.callback(backend.close)
            return stack.enter_context(served(backend)).client

        yield make


@pytest.fixture
def raw(server: RedisServer) -> Iterator[redis.Redis]:
    with server.client() as client:
        yield client


def begin(client: httpx.Client, **given: Any) -> str:
    answer = client.post("/v1/sessions", json={"sampler": {"temperature": 1.0, "seed": 3}, **given})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def say(client: httpx.Client, session: str, text: str, **headers: str) -> httpx.Response:
    asked = {"messages": [{"role": "user", "content": text}], **WORDS}
    return client.post(f"/v1/sessions/{session}/messages", json=asked, headers=headers)


def complete(client: httpx.Client, messages: list[dict[str, str]]) -> httpx.Response:
    asked = {"messages": messages, "temperature": 0, **WORDS}
    return client.post("/v1/chat/completions", json=asked)


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def evict(raw: redis.Redis, pattern: str) -> int:
    """As the server does it when it has no memory left."""
    keys = list(raw.scan_iter(f"{PREFIX}{pattern}"))
    return int(raw.delete(*keys)) if keys else 0


def test_a_session_that_an_emptied_server_had_is_expired_also_where_it_is_in_memory(
    server: RedisServer, worker: Worker
) -> None:
    one, other = worker(), worker()
    session = begin(one, name="tea")
    assert say(one, session, "one").status_code == 200
    server.kill()
    server.start()
    for client in (one, other):
        assert code(say(client, session, "two")) == (404, "expired")
        assert code(client.get(f"/v1/sessions/{session}")) == (404, "expired")
        assert code(client.post(f"/v1/sessions/{session}/rewind")) == (404, "expired")
        assert code(client.delete(f"/v1/sessions/{session}")) == (404, "expired")
        assert code(client.get("/v1/sessions/tea")) == (404, "session_not_found")
    assert say(one, begin(one, name="tea"), "one").status_code == 200


def test_what_was_deleted_or_never_was_is_not_expired(server: RedisServer, worker: Worker) -> None:
    client = worker()
    session = begin(client)
    assert client.delete(f"/v1/sessions/{session}").status_code == 204
    for name in (session, new_session_id()):
        assert code(client.get(f"/v1/sessions/{name}")) == (404, "session_not_found")


def test_a_response_that_an_emptied_server_had_is_expired(server: RedisServer, worker: Worker) -> None:
    client = worker()
    first = client.post("/v1/responses", json={"input": "tea?", "max_output_tokens": 4}).json()["id"]
    server.kill()
    server.start()
    asked = {"input": "why?", "previous_response_id": first, "max_output_tokens": 4}
    assert code(client.post("/v1/responses", json=asked)) == (404, "expired")
    assert code(client.get(f"/v1/responses/{first}")) == (404, "expired")


def test_a_stateless_call_reads_its_past_again_and_says_so(server: RedisServer, worker: Worker) -> None:
    one, other = worker(), worker()
    talk = [{"role": "user", "content": "green or black?"}]
    reply = complete(one, talk).json()["choices"][0]["message"]["content"]
    talk += [{"role": "assistant", "content": reply}, {"role": "user", "content": "and why?"}]
    before = complete(one, talk)
    assert int(before.headers["x-tenuto-restored-tokens"]) > 0
    server.kill()
    server.start()
    after = complete(other, talk)
    assert after.status_code == 200
    assert after.headers["x-tenuto-restored-tokens"] == "0"
    assert after.headers["x-tenuto-recomputed-tokens"] == str(after.json()["usage"]["prompt_tokens"])
    assert after.headers["x-tenuto-reason"] == "new"
    assert after.json()["choices"] == before.json()["choices"]


def test_evicted_rows_are_read_again_and_the_words_stay_the_same(raw: redis.Redis, worker: Worker) -> None:
    one = worker()
    session, twin = begin(one), begin(one)
    for each in (session, twin):
        assert say(one, each, "green or black?").status_code == 200
    kept = say(one, twin, "why?").json()["reply"]["content"]
    assert evict(raw, "b:rows*") > 0
    answer = say(worker(), session, "why?")
    assert answer.headers["x-tenuto-reason"] == "expired"
    assert answer.headers["x-tenuto-restored-tokens"] == "0"
    assert int(answer.headers["x-tenuto-recomputed-tokens"]) > 0
    assert answer.json()["reply"]["content"] == kept
    assert say(worker(), session, "so?").headers["x-tenuto-reason"] == "exact"


@pytest.mark.parametrize("what", ["b:manifest*", "refs"])
def test_an_evicted_turn_is_expired_and_never_an_error_of_ours(
    raw: redis.Redis, worker: Worker, what: str
) -> None:
    one = worker()
    session = begin(one)
    assert say(one, session, "one").status_code == 200
    assert evict(raw, what) > 0
    fresh = worker()
    for client in (fresh, one) if what == "refs" else (fresh,):
        assert code(say(client, session, "two")) == (404, "expired")
        assert code(client.get(f"/v1/sessions/{session}")) == (404, "expired")
    assert one.get("/v1/sessions").json()["data"] == []
    assert say(one, begin(one), "one").status_code == 200


def test_refs_that_are_evicted_while_a_turn_is_said_are_told_at_its_end(
    raw: redis.Redis, worker: Worker
) -> None:
    client = worker()
    session = begin(client)
    asked = {"messages": [{"role": "user", "content": "on"}], "max_tokens": 200, "stream": True}
    with client.stream("POST", f"/v1/sessions/{session}/messages", json=asked) as answer:
        lines = answer.iter_lines()
        assert "begun" in next(lines)
        evict(raw, "refs")
        last = [line for line in lines if line][-1]
    assert '"code":"expired"' in last.replace(" ", "")
    assert code(say(client, session, "two")) == (404, "expired")


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-random", "volatile-lru"])
def test_a_server_without_memory_left_never_makes_a_word_wrong(
    raw: redis.Redis, worker: Worker, policy: str
) -> None:
    """Each conversation hears what it would hear alone, until it ends by being told that it expired."""
    one, other = worker(), worker()
    alone = {seed: spoken(one, seed) for seed in range(3)}
    raw.flushall()
    raw.config_set("maxmemory-policy", policy)
    raw.config_set("maxmemory", str(raw.info("memory")["used_memory"] + 400_000))
    answers: list[tuple[int, str]] = []
    reasons: set[str] = set()
    for number in range(18):
        seed = number % 3
        session = one.post("/v1/sessions", json={"sampler": {"temperature": 1.0, "seed": seed}})
        if session.status_code != 201:
            answers.append(code(session))
            continue
        for turn, text in enumerate(alone[seed]):
            answer = say((one, other)[turn % 2], session.json()["id"], f"{turn}: more")
            if answer.status_code != 200:
                answers.append(code(answer))
                break
            assert answer.json()["reply"]["content"] == text
            reasons.add(answer.headers["x-tenuto-reason"])
            if error := answer.json()["save_error"]:
                answers.append((200, error["code"]))
                break
    assert raw.info("stats")["evicted_keys"] > 0
    told = {*answers} - {(404, "expired"), (200, "expired"), (507, "store_full"), (200, "store_full")}
    assert told <= {(409, "lease_lost"), (200, "lease_lost")}, told  # evicted while it was held
    assert "exact" in reasons


def spoken(client: httpx.Client, seed: int) -> list[str]:
    session = client.post("/v1/sessions", json={"sampler": {"temperature": 1.0, "seed": seed}}).json()["id"]
    return [say(client, session, f"{turn}: more").json()["reply"]["content"] for turn in range(4)]
