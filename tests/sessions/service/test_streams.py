"""A turn over HTTP, as JSON and as events: what is told, in which order, and what happens when either end
leaves."""

from __future__ import annotations

import json
import socket
import threading
import time

import httpx
import pytest

from engine.errors import Busy, ContextFull, EngineError, LeaseHeld, StoreUnavailable
from sessions.service.config import ServiceConfig
from tests.sessions.service.fake import FakeBackend, Script
from tests.sessions.service.serving import Served, events, served

HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def begin(at: Served) -> str:
    answer = at.client.post("/v1/sessions")
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def test_a_turn_is_one_json_object_or_the_same_as_events() -> None:
    with served(FakeBackend()) as at:
        session = begin(at)
        whole = at.client.post(f"/v1/sessions/{session}/messages", json=HELLO)
        assert whole.status_code == 200, whole.text
        assert whole.json()["reply"] == {"content": "one two three", "finish": "eos", "tokens": 3}
        assert whole.headers["etag"] == f'"{whole.json()["etag"]}"'
        with at.client.stream(
            "POST", f"/v1/sessions/{session}/messages", json=HELLO | {"stream": True}
        ) as it:
            assert it.status_code == 200
            assert it.headers["content-type"].startswith("text/event-stream")
            assert it.headers["x-tenuto-restored-tokens"] == "4"
            assert it.headers["x-tenuto-recomputed-tokens"] == "0"
            assert it.headers["x-tenuto-reason"] == "exact"
            told = list(events(it.iter_lines()))
        assert [name for name, _ in told] == ["begun", "piece", "piece", "piece", "ended"]
        assert "".join(data["text"] for name, data in told if name == "piece") == "one two three"
        assert told[0][1].keys() | told[-1][1].keys() == whole.json().keys()


def test_pieces_arrive_while_the_reply_is_said() -> None:
    with served(FakeBackend(Script(words=["a"] * 5, pause=0.1))) as at:
        session = begin(at)
        with at.client.stream(
            "POST", f"/v1/sessions/{session}/messages", json=HELLO | {"stream": True}
        ) as it:
            at_times = [time.monotonic() for name, _ in events(it.iter_lines()) if name == "piece"]
    assert at_times[-1] - at_times[0] > 0.25


def test_a_client_that_leaves_a_stream_ends_the_reply_and_what_was_said_is_kept() -> None:
    backend = FakeBackend(Script(words=["a "] * 1000, pause=0.02))
    with served(backend) as at:
        session = begin(at)
        with at.client.stream(
            "POST", f"/v1/sessions/{session}/messages", json=HELLO | {"stream": True}
        ) as it:
            for name, _ in events(it.iter_lines()):
                if name == "piece":
                    break
        assert backend.cancelled.wait(5)
        line = at.logged(2)[-1]
        assert line["reply_tokens"] < 100
        assert line["saved"] is True
        said = at.client.get(f"/v1/sessions/{session}").json()["messages"]
        assert [message["role"] for message in said] == ["user", "assistant"]
        assert said[-1]["content"].startswith("a ")


def test_a_client_that_does_not_wait_for_its_answer_ends_the_reply() -> None:
    backend = FakeBackend(Script(words=["a "] * 1000, pause=0.02))
    with served(backend) as at:
        session = begin(at)
        with pytest.raises(httpx.ReadTimeout):
            at.client.post(f"/v1/sessions/{session}/messages", json=HELLO, timeout=0.3)
        assert backend.cancelled.wait(5)


def test_a_client_that_leaves_before_the_reply_began_ends_it_too() -> None:
    go_on = threading.Event()
    backend = FakeBackend(Script(before=lambda: go_on.wait(10) and None))
    with served(backend) as at:
        session = begin(at)
        with pytest.raises(httpx.ReadTimeout):
            at.client.post(f"/v1/sessions/{session}/messages", json=HELLO | {"stream": True}, timeout=0.3)
        time.sleep(0.1)
        go_on.set()
        assert backend.cancelled.wait(5)


def test_a_client_that_takes_nothing_of_a_stream_is_as_good_as_gone() -> None:
    backend = FakeBackend(Script(words=["a" * 1_000_000] * 1000, pause=0.01))
    with served(backend, ServiceConfig(patience=0.5)) as at:
        session = begin(at)
        host, port = at.url.removeprefix("http://").split(":")
        body = json.dumps(HELLO | {"stream": True})
        with socket.create_connection((host, int(port))) as line:
            head = f"POST /v1/sessions/{session}/messages HTTP/1.1\r\nhost: {host}\r\n"
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            line.sendall((head + body).encode())
            assert backend.cancelled.wait(10)
            assert at.logged(2)[-1]["error"] == "client_gone"


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    with served(FakeBackend(), ServiceConfig(patience=0.2)) as at:
        host, port = at.url.removeprefix("http://").split(":")
        for path in ("/v1/sessions", "/v1/sessions/import"):
            with socket.create_connection((host, int(port)), timeout=10) as line:
                head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-length: 100\r\n\r\n{{"
                line.sendall(head.encode())
                answer = line.makefile("rb").read()  # to the end: the connection cannot be used again
                assert answer.startswith(b"HTTP/1.1 408")
                assert b"request_timeout" in answer


def test_text_that_some_take_for_the_end_of_a_line_is_escaped() -> None:
    words = ["a\u2028b", "c\x85d", "e\nf\r\ng", "\u2029"]
    with served(FakeBackend(Script(words=words))) as at:
        answer = at.client.post(f"/v1/sessions/{begin(at)}/messages", json=HELLO | {"stream": True})
        told = list(events(iter(answer.text.splitlines())))
        assert [data["text"] for name, data in told if name == "piece"] == words
        assert told[-1][1]["reply"]["content"] == "".join(words)


def test_a_silent_stream_says_that_it_is_alive() -> None:
    backend = FakeBackend(Script(words=["a"], pause=0.5))
    with served(backend, ServiceConfig(keepalive=0.1)) as at:
        session = begin(at)
        answer = at.client.post(f"/v1/sessions/{session}/messages", json=HELLO | {"stream": True})
        assert answer.text.count(": \n\n") >= 2
        assert [name for name, _ in events(iter(answer.text.splitlines()))] == ["begun", "piece", "ended"]


@pytest.mark.parametrize(
    ("error", "status", "code", "wait"),
    [
        (Busy("too much", retry_after=7), 429, "busy", "7"),
        (ContextFull("no room"), 400, "context_length_exceeded", None),
        (LeaseHeld("held", holder="pid 1", until=12.5, fence=3), 423, "lease_held", "1"),
        (EngineError("broken"), 500, "engine_error", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_reply_is_a_status(
    error: Exception, status: int, code: str, wait: str | None, stream: bool
) -> None:
    def fail() -> None:
        raise error

    with served(FakeBackend(Script(before=fail))) as at:
        answer = at.client.post(f"/v1/sessions/{begin(at)}/messages", json=HELLO | {"stream": stream})
        assert answer.status_code == status
        told = answer.json()["error"]
        assert told["code"] == code
        assert told["message"] == str(error)
        assert answer.headers.get("retry-after") == wait
        if status == 423:
            assert told["details"] == {"holder": "pid 1", "until": 12.5, "fence": 3}
        assert at.logged(2)[-1]["error"] == code


def test_an_error_in_the_middle_of_a_stream_is_its_last_event() -> None:
    with served(FakeBackend(Script(fail=EngineError("a rank was lost")))) as at:
        session = begin(at)
        answer = at.client.post(f"/v1/sessions/{session}/messages", json=HELLO | {"stream": True})
        told = list(events(iter(answer.text.splitlines())))
        assert [name for name, _ in told] == ["begun", "piece", "piece", "piece", "error"]
        assert told[-1][1]["error"]["code"] == "engine_error"
        whole = at.client.post(f"/v1/sessions/{session}/messages", json=HELLO)
        assert whole.status_code == 500
        assert whole.json()["error"]["code"] == "engine_error"


def test_a_turn_that_was_said_and_not_saved_says_so() -> None:
    with served(FakeBackend(Script(save_error=StoreUnavailable("no store")))) as at:
        answer = at.client.post(f"/v1/sessions/{begin(at)}/messages", json=HELLO).json()
        assert answer["saved"] is None
        assert answer["reply"]["content"]
        assert answer["save_error"]["code"] == "store_unavailable"


@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_of_ours_is_an_answer_and_a_line_in_the_log_without_what_was_said(stream: bool) -> None:
    with served(FakeBackend(Script(fail=KeyError("a secret word")))) as at:
        session = begin(at)
        ask = {"json": HELLO | {"stream": stream}}
        if stream:
            with pytest.raises(httpx.RemoteProtocolError):
                at.client.post(f"/v1/sessions/{session}/messages", **ask)
        else:
            answer = at.client.post(f"/v1/sessions/{session}/messages", **ask)
            assert answer.status_code == 500
            assert answer.json()["error"]["code"] == "internal_error"
        bug = next(line for line in at.logged(3) if line["event"] == "bug")
        assert bug["kind"] == "KeyError"
        assert any("fake.py" in frame for frame in bug["frames"])
        assert "secret" not in at.log.getvalue()


def test_more_requests_than_may_be_answered_at_once_are_refused() -> None:
    go_on = threading.Event()
    backend = FakeBackend(Script(before=lambda: go_on.wait(10) and None))
    with served(backend, ServiceConfig(max_requests=1)) as at:
        session = begin(at)
        waiting = threading.Thread(
            target=lambda: httpx.post(f"{at.url}/v1/sessions/{session}/messages", json=HELLO, timeout=20)
        )
        waiting.start()
        until = time.monotonic() + 5
        while not backend.running and time.monotonic() < until:
            time.sleep(0.01)
        answer = at.client.get("/health")
        assert answer.status_code == 429
        assert answer.headers["retry-after"]
        go_on.set()
        waiting.join()
        assert at.client.get("/health").status_code == 200
