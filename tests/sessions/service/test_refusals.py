"""Whatever is sent, the answer is a status of the table with a reason, and never ours to be ashamed of."""

from __future__ import annotations

import inspect
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from engine import errors
from sessions.service import backend
from sessions.service.bodies import depth
from sessions.service.config import ServiceConfig
from sessions.service.refusals import STATUS, body_of, code_of, status_of
from tests.sessions.service.fake import FakeBackend
from tests.sessions.service.serving import Served, served

SESSION = "0" * 26
MESSAGES = f"/v1/sessions/{SESSION}/messages"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def at() -> Iterator[Served]:
    fake = FakeBackend()
    fake.create("default")
    with served(fake, ServiceConfig(max_body=100_000, max_import=100_000)) as running:
        yield running


def refused(answer: httpx.Response, *statuses: int) -> dict[str, Any]:
    assert answer.status_code in (statuses or (400,)), (answer.status_code, answer.text)
    error = answer.json()["error"]
    assert error.keys() - {"details"} == {"message", "type", "code", "param"}
    assert error["message"]
    assert error["code"]
    assert answer.headers["x-request-id"]
    return dict(error)


def every_error() -> list[type[errors.TenutoError]]:
    return [e for e in vars(errors).values() if inspect.isclass(e) and issubclass(e, errors.TenutoError)]


@pytest.mark.parametrize("error", every_error())
def test_every_error_has_a_status_and_a_code(error: type[errors.TenutoError]) -> None:
    made = error("so it is", path="/private")
    assert status_of(made) in {400, 401, 404, 409, 412, 423, 429, 500, 503, 507}
    assert code_of(made)
    assert "/private" not in json.dumps(body_of(made))


def test_the_table_is_what_the_backend_says_of_its_errors() -> None:
    said = inspect.getdoc(backend.Backend) or ""
    for name, status in (
        ("Busy", 429),
        ("Draining", 503),
        ("NoSlot", 503),
        ("ContextFull", 400),
        ("SessionNotFound", 404),
        ("SessionExists", 409),
        ("StaleSession", 412),
        ("LeaseHeld", 423),
        ("LeaseLost", 409),
        ("EditRefused", 409),
    ):
        assert name in said
        assert STATUS.get(vars(errors)[name], status_of(vars(errors)[name](""))) == status


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nothing",
        b"\xff\xfe",
        b"null",
        b"[]",
        b'"text"',
        b"12",
        b"{}",
        b'{"messages": null}',
        b'{"messages": []}',
        b'{"messages": {}}',
        b'{"messages": "hello"}',
        b'{"messages": [null]}',
        b'{"messages": [["user", "hello"]]}',
        b'{"messages": [{"role": "user"}]}',
        b'{"messages": [{"role": "user", "content": null}]}',
        b'{"messages": [{"role": "user", "content": 12}]}',
        b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
        b'{"messages": [{"role": "wizard", "content": "hello"}]}',
        b'{"messages": [{"role": "user", "content": "hello", "name": "x"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "\\udc00\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
        json.dumps(HELLO).encode("utf-16"),
        json.dumps(HELLO).encode("utf-32-le"),
        b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 0}',
        b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": "12"}',
        b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1.5}',
        b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": true}',
        b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 99999999999999999999}',
        b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": NaN}',
        b'{"messages": [{"role": "user", "content": "a"}], "stream": "yes"}',
        b'{"messages": [{"role": "user", "content": "a"}], "stop": "end"}',
        b'{"messages": [{"role": "user", "content": "a"}], "stop": [""]}',
        b'{"messages": [{"role": "user", "content": "a"}], "sampler": {"temperature": -1}}',
        b'{"messages": [{"role": "user", "content": "a"}], "sampler": {"temperature": NaN}}',
        b'{"messages": [{"role": "user", "content": "a"}], "sampler": {"temperature": 1e999}}',
        b'{"messages": [{"role": "user", "content": "a"}], "sampler": {"seed": -1}}',
        b'{"messages": [{"role": "user", "content": "a"}], "sampler": {"heat": 1}}',
        b'{"messages": [{"role": "user", "content": "a"}], "sampler": {"logit_bias": {"x": 1}}}',
        b'{"messages": [{"role": "user", "content": "a"}], "sampler": {"logit_bias": {"\\u0661": 1}}}',
        b'{"messages": [{"role": "user", "content": "a"}], "fallback": "hope"}',
        b'{"messages": [{"role": "user", "content": "a"}], "tools": []}',
        b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"messages": ' + b"[" * 65 + b"]" * 65 + b"}",
        b"[" * 50_000,
        b'{"a":' * 20_000,
    ],
    ids=lambda body: f"{len(body)} bytes …{body[-60:].decode('latin-1')}",
)
def test_a_body_of_a_wrong_shape_is_refused_with_a_reason(at: Served, body: bytes) -> None:
    answer = at.client.post(MESSAGES, content=body, headers={"content-type": "application/json"})
    refused(answer)


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""]
)
def test_a_body_that_does_not_say_that_it_is_json_is_refused(at: Served, kind: str) -> None:
    body = json.dumps(HELLO).encode()
    answer = at.client.post(MESSAGES, content=body, headers={"content-type": kind})
    assert "application/json" in refused(answer)["message"]


def test_what_is_wrong_is_named_and_not_said_back(at: Served) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}, {"role": "a secret", "content": "x"}]}
    answer = at.client.post(MESSAGES, json=body)
    assert refused(answer)["param"] == "messages[1].role"
    assert "secret" not in answer.text


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_refused_before_it_was_read(at: Served, chunked: bool) -> None:
    def forever() -> Iterator[bytes]:
        for _ in range(1000):
            yield b"x" * 10_000

    content = forever() if chunked else b"x" * 10_000_000
    with httpx.Client(base_url=at.url, trust_env=False) as client:
        answer = client.post(MESSAGES, content=content)
    assert refused(answer, 413)["code"] == "body_too_large"


def test_a_body_that_is_never_sent_is_not_waited_for_if_its_length_says_too_much(at: Served) -> None:
    host, port = at.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as line:
        head = f"POST {MESSAGES} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 99999999999\r\n\r\n"
        line.sendall(head.encode())
        assert line.recv(1000).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/v1/sessions/", 404),
        ("PUT", "/v1/sessions", 405),
        ("TRACE", "/health", 405),
        ("GET", f"/v1/sessions/{'x' * 26}", 404),
        ("GET", "/v1/sessions/%00", 404),
        ("GET", "/v1/sessions/%2e%2e%2f%2e%2e%2fetc%2fpasswd", 404),
        ("GET", "/v1/sessions/..%2f..%2fetc", 404),
        ("GET", "/v1/sessions/%ff%fe", 404),
        ("GET", f"/v1/sessions/{'x' * 5000}", 400),
        ("GET", "/v1/sessions?limit=0", 400),
        ("GET", "/v1/sessions?limit=101", 400),
        ("GET", "/v1/sessions?limit=ten", 400),
        ("GET", f"/v1/sessions?containing={'x' * 201}", 400),
        ("POST", "/slots/0", 400),
        ("POST", "/slots/0?action=melt", 400),
        ("POST", "/slots/0?action=save", 400),
        ("POST", "/slots/99?action=erase", 400),
        ("POST", "/slots/-1?action=erase", 400),
        ("POST", "/slots/zero?action=erase", 400),
    ],
)
def test_a_path_or_parameter_that_is_wrong_is_refused(
    at: Served, method: str, path: str, status: int
) -> None:
    refused(at.client.request(method, path), status)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../x", "/etc/x", "a\x00b", "x" * 65, "é", " ", "a\n"]
)
def test_a_name_that_may_not_be_one_is_refused(at: Served, name: str) -> None:
    refused(at.client.post("/v1/sessions", json={"name": name}))
    refused(at.client.post("/v1/sessions/import", params={"name": name}, content=b"x"))
    refused(at.client.post(f"/v1/sessions/{SESSION}/fork", json={"name": name}))


@pytest.mark.parametrize(
    "tag", ["unquoted", '"open', '"a" "b"', "W/", 'w/"a"', '"a",, "b"', "\xff", "x" * 5000, '""x']
)
def test_an_if_match_that_holds_no_tags_is_refused(at: Served, tag: str) -> None:
    answer = at.client.post(MESSAGES, json=HELLO, headers={"if-match": tag.encode("latin-1")})
    refused(answer)


@pytest.mark.parametrize("tag", ['"other"', 'W/"m-b3-00"', '"a", "b"', '""', f'"m-b3-{"0" * 64}"'])
def test_an_if_match_of_another_turn_is_412(at: Served, tag: str) -> None:
    assert refused(at.client.post(MESSAGES, json=HELLO, headers={"if-match": tag}), 412)["code"] == (
        "stale_session"
    )


def test_a_request_that_is_no_http_is_refused(at: Served) -> None:
    host, port = at.url.removeprefix("http://").split(":")
    for text in (b"\x16\x03\x01\x02\x00\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"GET /" + b"x" * 10_000_000):
        with socket.create_connection((host, int(port)), timeout=10) as line:
            try:
                line.sendall(text)
                answer = line.recv(1000)
            except (BrokenPipeError, ConnectionResetError):
                continue
            assert answer.startswith(b"HTTP/1.1 4"), answer
    assert at.client.get("/health").status_code == 200


@pytest.mark.parametrize("text", ["\\ud83d\\ude00", "\\\\ud800", "\U0001f600", "\\u0000", "\\n"])
def test_characters_may_be_escaped(at: Served, text: str) -> None:
    body = f'{{"messages": [{{"role": "user", "content": "{text}"}}]}}'.encode()
    answer = at.client.post(MESSAGES, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", 0),
        (b"[]", 1),
        (b'{"a": [1, {"b": 2}], "c": []}', 3),
        (b'"[[[["', 0),
        (b'["\\"[[", "\\\\", []]', 2),
        (b"]]]][[", 0),
    ],
)
def test_the_depth_of_a_body_is_that_of_its_brackets_outside_of_strings(text: bytes, expected: int) -> None:
    assert depth(text) == expected
