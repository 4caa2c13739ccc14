"""No tenant has more in a minute than it may, and each is told when there will be more."""

from __future__ import annotations

from sessions.service.config import ServiceConfig
from sessions.service.rates import Rate
from tests.sessions.clock import Clock
from tests.sessions.service.fake import FakeBackend, Script
from tests.sessions.service.serving import served

HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def test_a_rate_gives_a_minutes_worth_and_then_as_it_comes_back() -> None:
    clock = Clock(100.0)
    rate = Rate(6, clock)
    for _ in range(6):
        assert rate.wait("ann") is None
        rate.take("ann")
    assert rate.wait("ann") == 10
    assert rate.wait("bob") is None
    clock.now += 10
    assert rate.wait("ann") is None
    rate.take("ann", 7)
    assert rate.wait("ann") == 70
    clock.now += 3600
    assert rate.wait("ann", 6) is None
    assert rate.wait("ann", 600) is None
    rate.take("ann", 6)
    assert rate.wait("ann") == 10


def test_without_a_limit_there_is_none() -> None:
    rate = Rate(None)
    rate.take("ann", 1e12)
    assert rate.wait("ann") is None


def test_requests_beyond_the_rate_are_refused_until_there_are_more() -> None:
    with served(FakeBackend(), ServiceConfig(requests_per_minute=2)) as at:
        assert [at.client.post("/v1/sessions").status_code for _ in range(3)] == [201, 201, 429]
        answer = at.client.get("/v1/sessions")
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        assert 20 <= int(answer.headers["retry-after"]) <= 30
        assert at.client.get("/health").status_code == 200


def test_a_turn_is_refused_while_its_tenant_is_in_debt_for_tokens() -> None:
    with served(FakeBackend(Script(words=["a "] * 20)), ServiceConfig(tokens_per_minute=10)) as at:
        session = at.client.post("/v1/sessions").json()["id"]
        assert at.client.post(f"/v1/sessions/{session}/messages", json=HELLO).status_code == 200
        answer = at.client.post(f"/v1/sessions/{session}/messages", json=HELLO)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "busy")
        assert 60 <= int(answer.headers["retry-after"]) <= 72
        assert at.client.get(f"/v1/sessions/{session}").status_code == 200
