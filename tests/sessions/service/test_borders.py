"""Requests that are made to be understood in two ways are understood in none; what a tenant may not have is
not to be had by another spelling either."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest

from engine.errors import NameRefused, StateError
from serialization.manifest import Manifest
from sessions.keys import ApiKeys
from sessions.service.config import ServiceConfig
from sessions.stores.base import tenant_key
from sessions.stores.open import open_store
from tests.serialization.states import EMPTY
from tests.sessions.service.fake import FakeBackend
from tests.sessions.service.serving import Served, served

BODY = json.dumps({"name": "mine"}).encode()


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> ApiKeys:
    return ApiKeys(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def keys(ring: ApiKeys) -> dict[str, str]:
    return {name: ring.create(name)[1] for name in ("ann", "eve")}


@pytest.fixture(scope="module")
def at(ring: ApiKeys) -> Iterator[Served]:
    with served(FakeBackend(), ServiceConfig(), ring) as running:
        yield running


def sent(at: Served, data: bytes) -> bytes:
    """All that comes back before the line is closed, or falls silent."""
    host, port = at.url.removeprefix("http://").split(":")
    heard = b""
    with socket.create_connection((host, int(port)), timeout=10) as line:
        line.sendall(data)
        line.settimeout(2)
        try:
            while more := line.recv(65536):
                heard += more
        except (TimeoutError, ConnectionResetError):
            pass
    return heard


def statuses(heard: bytes) -> list[int]:
    return [int(part[:3]) for part in heard.split(b"HTTP/1.1 ")[1:]]


def request(method: str, path: str, *headers: bytes, body: bytes = b"") -> bytes:
    head = [f"{method} {path} HTTP/1.1".encode(), b"host: 127.0.0.1", *headers]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def key(text: str) -> bytes:
    return b"authorization: Bearer " + text.encode()


JSON = b"content-type: application/json"
LENGTH = b"content-length: %d" % len(BODY)
CHUNKED = b"transfer-encoding: chunked"
#: A second request, hidden in the body of a first one.
HIDDEN = b"0\r\n\r\nGET /v1/sessions HTTP/1.1\r\nhost: 127.0.0.1\r\n"


@pytest.mark.parametrize(
    "headers",
    [
        (LENGTH, CHUNKED),
        (CHUNKED, LENGTH),
        (b"content-length: 3", LENGTH),
        (LENGTH, b"content-length: 3"),
        (b"content-length: +%d" % len(BODY),),
        (b"content-length: %d, 3" % len(BODY),),
        (b"content-length: 0x10",),
        (b"content-length: -1",),
        (b"transfer-encoding: xchunked",),
        (b"transfer-encoding: chunked, identity",),
        (b"transfer-encoding : chunked",),
        (b"transfer-encoding: \x0bchunked",),
        (LENGTH, b"x: a\r\n b"),
        (LENGTH, b"x: a\x00b"),
        (LENGTH, b"x\x00: a"),
        (LENGTH, b"x: a\rb: c"),
        (LENGTH, b": a"),
    ],
    ids=lambda headers: b" ".join(headers).decode("latin-1").replace("\x00", "NUL"),
)
def test_a_request_of_two_lengths_is_one_request_or_none(
    at: Served, keys: dict[str, str], headers: tuple[bytes, ...]
) -> None:
    """What is hidden in the body of ann's is never answered as eve's."""
    hidden = HIDDEN + key(keys["eve"]) + b"\r\n\r\n"
    heard = sent(at, request("POST", "/v1/sessions", key(keys["ann"]), JSON, *headers, body=BODY + hidden))
    found = statuses(heard)
    assert all(status < 500 for status in found), heard
    assert found.count(200) == 0, heard  # nobody was told eve's list
    assert at.client.get("/health").status_code == 200


@pytest.mark.parametrize("first", ["ann", "eve"])
def test_two_keys_are_no_key(at: Served, keys: dict[str, str], first: str) -> None:
    """A proxy may have looked at the other one."""
    second = {"ann": "eve", "eve": "ann"}[first]
    heard = sent(
        at, request("GET", "/v1/sessions", key(keys[first]), key(keys[second]), b"connection: close")
    )
    assert statuses(heard) == [401]


def test_a_tenant_is_who_has_the_key_whatever_else_is_said(at: Served, keys: dict[str, str]) -> None:
    of_ann = {"authorization": f"Bearer {keys['ann']}"}
    of_eve = {"authorization": f"Bearer {keys['eve']}"}
    session = at.client.post("/v1/sessions", headers=of_ann).json()["id"]
    for more in ("x-tenant", "x-tenuto-tenant", "openai-organization", "openai-project", "x-forwarded-user"):
        path = f"/v1/sessions/{session}"
        assert at.client.get(path, headers={**of_eve, more: "ann"}).status_code == 404
        assert at.client.get(path, params={"tenant": "ann"}, headers=of_eve).status_code in (400, 404)
    body = {"name": "x", "tenant": "ann"}
    assert at.client.post("/v1/sessions", json=body, headers=of_eve).status_code == 400


@pytest.mark.parametrize(
    "path",
    [
        "//v1/sessions",
        "/v1//sessions",
        "/V1/sessions",
        "/v1/sessions/",
        "/health/../v1/sessions",
        "/health/%2e%2e/v1/sessions",
        "/health;/v1/sessions",
        "/v1/sessions;x=y",
        "/v1/%73essions%00",
        "http://127.0.0.1/v1/sessions",
        "http://health/health",
        "*",
    ],
)
def test_no_other_spelling_of_a_path_needs_no_key(at: Served, path: str) -> None:
    found = statuses(sent(at, request("GET", path, b"connection: close")))
    assert len(found) == 1
    assert found[0] in (400, 401, 404) or path == "http://health/health"


def test_more_headers_than_anybody_has_are_refused_or_not_looked_at(at: Served, keys: dict[str, str]) -> None:
    for headers in (
        [b"x-%d: y" % number for number in range(20_000)],
        [b"x: " + b"y" * 2_000_000],
        [b"x" * 2_000_000 + b": y"],
        [b"authorization: Bearer " + b"t" * 2_000_000],
    ):
        found = statuses(sent(at, request("GET", "/v1/sessions", *headers, b"connection: close")))
        assert found in ([], [400], [401], [431])
    assert at.client.get("/health").status_code == 200


@pytest.mark.parametrize(
    "tenant",
    [
        *("", ".", "..", "../ann", "a/b", "a\\b", "a\0b", "a:b", "a b", "ann ", "ann\n"),
        *("{ann}", "*", "%61nn"),
        *("\u0430nn", "\uff41nn", "ann\u200b", "\u0661"),  # which look like ann and 1
        *("-ann", ".ann", "_ann", "x" * 65, "x" * 10**7),
    ],
    ids=lambda tenant: f"{len(tenant)} {tenant[:12]!a}",
)
def test_a_tenants_name_is_a_plain_word_that_its_manifests_may_have(ring: ApiKeys, tenant: str) -> None:
    with pytest.raises(NameRefused):
        ring.create(tenant)
    with pytest.raises(NameRefused):
        open_store("memory:", tenant)
    with pytest.raises(StateError):
        replace(EMPTY, tenant=tenant).encode()


@pytest.mark.parametrize("tenant", ["a", "0", "x" * 64, "a._-", "Ann"])
def test_what_may_have_a_key_may_have_a_session(ring: ApiKeys, tenant: str) -> None:
    ring.create(tenant)
    open_store("memory:", tenant).close()
    assert Manifest.decode(replace(EMPTY, tenant=tenant).encode()).tenant == tenant


def test_names_of_tenants_that_differ_in_case_are_two() -> None:
    assert tenant_key("ann") != tenant_key("Ann")
