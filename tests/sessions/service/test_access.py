"""Who may ask: this machine alone without keys, and with keys whoever has one, as its tenant."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest

from engine.errors import UsageError
from sessions.keys import ApiKeys
from sessions.service.address import Address, is_loopback
from sessions.service.config import ServiceConfig
from tests.sessions.service.fake import FakeBackend
from tests.sessions.service.serving import Served, served

As = Callable[[str], dict[str, str]]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> ApiKeys:
    return ApiKeys(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def as_(keys: ApiKeys) -> As:
    """The headers of a tenant's requests."""
    made = {tenant: keys.create(tenant)[1] for tenant in ("ann", "bob")}
    return lambda tenant: {"authorization": f"Bearer {made[tenant]}"}


@pytest.fixture(scope="module")
def at(keys: ApiKeys) -> Iterator[Served]:
    with served(FakeBackend(), ServiceConfig(operators=("bob",)), keys) as running:
        yield running


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer tnt_aaaaaaaaaaaaa_b"},
        {"authorization": "Basic tnt_aaaaaaaaaaaaa_b"},
        {"authorization": "tnt_aaaaaaaaaaaaa_b"},
        {"authorization": b"Bearer \xff\xfe"},
        {"x-api-key": "tnt_aaaaaaaaaaaaa_b"},
    ],
)
@pytest.mark.parametrize("path", ["/v1/sessions", "/metrics", "/slots", "/props", "/nowhere"])
def test_without_a_key_that_is_somebodys_nothing_is_told(
    at: Served, headers: dict[str, str | bytes], path: str
) -> None:
    answer = at.client.get(path, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "invalid_api_key"


def test_whether_it_lives_is_told_to_everyone(at: Served) -> None:
    assert at.client.get("/health").json() == {"status": "ok"}


def test_a_key_is_looked_at_before_a_body_is_read(at: Served) -> None:
    host, port = at.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as line:
        line.sendall(b"POST /v1/sessions HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
        assert line.recv(1000).startswith(b"HTTP/1.1 401")


def test_a_session_is_its_tenants_alone(at: Served, as_: As) -> None:
    session = at.client.post("/v1/sessions", headers=as_("ann")).json()["id"]
    assert at.client.get(f"/v1/sessions/{session}", headers=as_("ann")).status_code == 200
    theirs = at.client.get(f"/v1/sessions/{session}", headers=as_("bob"))
    nobodys = at.client.get(f"/v1/sessions/{'0' * 25}9", headers=as_("bob"))
    assert theirs.status_code == nobodys.status_code == 404
    assert theirs.json()["error"]["code"] == nobodys.json()["error"]["code"]


def test_what_is_counted_of_all_tenants_is_for_an_operator(at: Served, as_: As) -> None:
    assert at.client.get("/metrics", headers=as_("bob")).status_code == 200
    answer = at.client.get("/metrics", headers=as_("ann"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "operators_only")


def test_the_description_says_that_a_key_is_needed(at: Served) -> None:
    told = at.client.get("/openapi.json").json()
    assert told["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert told["security"] == [{"key": []}]


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "127.0.0.1.evil.example"},
        {"host": "localhost.evil.example:8080"},
        {"host": "[::1"},
        {"host": ""},
        {"origin": "http://evil.example"},
        {"origin": "http://localhost:1"},
        {"origin": "null"},
        {"origin": "http://[::1"},
    ],
)
def test_without_keys_a_page_of_elsewhere_is_refused(headers: dict[str, str]) -> None:
    with served(FakeBackend()) as at:
        answer = at.client.post("/v1/sessions", headers=headers)
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "forbidden_origin"


def test_its_own_page_and_names_that_were_allowed_are_not() -> None:
    with served(FakeBackend(), ServiceConfig(hosts=("box.example",))) as at:
        for headers in (
            {"host": "localhost:99"},
            {"host": "[::1]:99"},
            {"host": "box.example"},
            {"origin": at.url},
        ):
            assert at.client.post("/v1/sessions", headers=headers).status_code == 201


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.9.9.9"])
def test_the_loopback_reaches_nobody_else(host: str) -> None:
    assert is_loopback(host)
    assert not Address(host, 0).reaches_elsewhere()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1"])
def test_other_addresses_do(host: str) -> None:
    assert Address(host, 0).reaches_elsewhere()


def test_a_host_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError):
        Address("256.1.1.1.invalid", 0).reaches_elsewhere()
