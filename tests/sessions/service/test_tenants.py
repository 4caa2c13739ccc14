"""No tenant sees, hits, names or changes what is another's, whatever it knows of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from sessions.keys import ApiKeys
from sessions.service.config import ServiceConfig
from tests.sessions.service.conftest import MakeBackend
from tests.sessions.service.serving import served

SECRET = "the secret of ann is a long sentence that no other tenant may ever find in a cache " * 4


class Tenant:
    """A client with a key of its own."""

    def __init__(self, url: str, key: str) -> None:
        self.http = httpx.Client(
            base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=60, trust_env=False
        )

    def say(self, session: str, text: str = SECRET, **headers: str) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
        return self.http.post(f"/v1/sessions/{session}/messages", json=body, headers=headers)

    def chat(self, text: str = SECRET, **fields: Any) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}
        answer = self.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def cached(self, **fields: Any) -> int:
        return int(self.chat(**fields)["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.fixture
def tenants(
    make_backend: MakeBackend, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Tenant]]:
    keys = ApiKeys(tmp_path_factory.mktemp("keys"))
    with served(make_backend(), ServiceConfig(), keys) as at:
        made: dict[str, Tenant] = {}

        def tenant(name: str) -> Tenant:
            if name not in made:
                made[name] = Tenant(at.url, keys.create(name)[1])
            return made[name]

        yield tenant
        for each in made.values():
            each.http.close()


@pytest.fixture
def ann(tenants: Callable[[str], Tenant]) -> Tenant:
    return tenants("ann")


@pytest.fixture
def eve(tenants: Callable[[str], Tenant]) -> Tenant:
    return tenants("eve")


def test_what_another_knows_of_a_session_is_of_no_use(ann: Tenant, eve: Tenant) -> None:
    session = ann.http.post("/v1/sessions", json={"name": "diary"}).json()["id"]
    tag = ann.say(session).headers["etag"]
    for ref in (session, session[:20], session.lower(), "diary"):
        for headers in ({}, {"if-match": tag}, {"if-match": "*"}):
            path = f"/v1/sessions/{ref}"
            answers = [
                eve.http.get(path, headers=headers),
                eve.http.patch(path, json={"name": "mine"}, headers=headers),
                eve.http.delete(path, headers=headers),
                eve.http.get(f"{path}/export"),
                eve.say(ref, "hello", **headers),
                *(
                    eve.http.post(f"{path}/{verb}", json=body, headers=headers)
                    for verb, body in (
                        ("regenerate", {}),
                        ("edit", {"content": "x"}),
                        ("fork", {}),
                        ("rewind", {}),
                        ("save", {}),
                    )
                ),
            ]
            assert {answer.status_code for answer in answers} == {404}
            assert not any("secret" in answer.text for answer in answers)
    assert ann.http.get(f"/v1/sessions/{session}").headers["etag"] == tag


def test_a_refusal_of_what_is_anothers_is_that_of_what_is_nobodys(ann: Tenant, eve: Tenant) -> None:
    session = ann.http.post("/v1/sessions", json={"name": "diary"}).json()["id"]
    theirs, nobodys = (eve.http.get(f"/v1/sessions/{ref}").json()["error"] for ref in ("diary", "dairy"))
    assert theirs["message"].replace("diary", "dairy") == nobodys["message"]
    assert theirs["code"] == nobodys["code"]
    other = ("0" if session[-1] != "0" else "1").join((session[:-1], ""))
    theirs, nobodys = (eve.http.get(f"/v1/sessions/{ref}").json()["error"] for ref in (session, other))
    assert theirs["message"].replace(session, other) == nobodys["message"]


def test_lists_slots_and_storage_are_ones_own(ann: Tenant, eve: Tenant) -> None:
    session = ann.http.post("/v1/sessions", json={"name": "diary", "title": "secret"}).json()["id"]
    ann.say(session)
    assert eve.http.get("/v1/sessions?containing=secret").json()["data"] == []
    assert all(slot["session"] is None for slot in eve.http.get("/slots").json())
    assert any(slot["session"] == session for slot in ann.http.get("/slots").json())
    assert eve.http.get("/v1/storage").json()["rows_bytes"] == 0
    assert eve.http.get("/metrics").status_code == 403


def test_the_same_name_is_free_for_each(ann: Tenant, eve: Tenant) -> None:
    first = ann.http.post("/v1/sessions", json={"name": "diary"}).json()["id"]
    second = eve.http.post("/v1/sessions", json={"name": "diary"}).json()["id"]
    assert first != second
    eve.say("diary", "mine")
    assert ann.http.get("/v1/sessions/diary").json()["turns"] == 0


def test_a_past_is_hit_by_its_own_tenant_alone(ann: Tenant, eve: Tenant) -> None:
    assert ann.cached() == 0
    assert ann.cached() > 100
    session = eve.http.post("/v1/sessions").json()["id"]
    assert eve.say(session).headers["x-tenuto-restored-tokens"] == "0"


def test_nor_by_a_stateless_call_of_another(ann: Tenant, eve: Tenant) -> None:
    ann.say(ann.http.post("/v1/sessions").json()["id"])
    ann.chat()
    assert eve.cached() == 0


def test_a_salt_shares_with_the_same_salt_alone(ann: Tenant, eve: Tenant) -> None:
    assert ann.cached(cache_salt="a") == 0
    assert ann.cached(cache_salt="a") > 100
    assert ann.cached(cache_salt="b") == 0
    assert ann.cached() == 0
    assert eve.cached(cache_salt="a") == 0


def test_a_session_is_talked_in_with_a_salt(ann: Tenant) -> None:
    body = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 4}

    def restored(**fields: str) -> int:
        session = ann.http.post("/v1/sessions").json()["id"]
        answer = ann.http.post(f"/v1/sessions/{session}/messages", json={**body, **fields})
        return int(answer.headers["x-tenuto-restored-tokens"])

    assert restored(cache_salt="a") == 0
    assert restored(cache_salt="b") == restored() == ann.cached(cache_salt="c") == 0
    assert restored(cache_salt="a") > 100
    assert ann.cached(cache_salt="a") > 100
    refused = ann.http.post("/v1/sessions/x/messages", json={**body, "cache_salt": "x" * 129})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")


def test_the_tag_of_anothers_turn_is_that_of_nobodys(ann: Tenant, eve: Tenant) -> None:
    sessions = {each: each.http.post("/v1/sessions").json()["id"] for each in (ann, eve)}
    theirs = ann.say(sessions[ann]).headers["etag"]
    mine = eve.say(sessions[eve], "hello").headers["etag"]
    nobodys = theirs[:-3] + ("00" if theirs[-3:-1] != "00" else "11") + '"'
    path = f"/v1/sessions/{sessions[eve]}"
    answers = [eve.say(sessions[eve], "more", **{"if-match": tag}) for tag in (theirs, nobodys)]
    assert {answer.status_code for answer in answers} == {412}
    assert len({answer.json()["error"]["message"] for answer in answers}) == 1
    for tag in (theirs, nobodys):
        assert eve.http.get(path, headers={"if-none-match": tag}).status_code == 200
        assert eve.http.delete(path, headers={"if-match": tag}).status_code == 412
    assert eve.http.get(path).headers["etag"] == mine


def test_a_name_that_only_looks_the_same_or_is_endless_is_none(ann: Tenant, eve: Tenant) -> None:
    ann.http.post("/v1/sessions", json={"name": "diary"})
    for name in (
        "di\u0430ry",
        "\uff44iary",
        "diary\u200b",
        "diary\u0000",
        "DIARY",
        "diary/",
        "../diary",
        "diary*",
    ):
        assert ann.http.post("/v1/sessions/diary/fork", json={"name": name}).status_code in (201, 400)
        for each in (ann, eve):
            found = each.http.get(f"/v1/sessions/{quote(name, safe='')}")
            assert found.status_code in (400, 404) or (each is ann and name == "DIARY")
    long = "x" * 10_000_000
    for answer in (
        ann.http.post("/v1/sessions", json={"name": long}),
        ann.http.post("/v1/sessions/diary/fork", json={"name": long}),
        ann.http.post("/slots/0?action=save", json={"filename": long}),
        ann.http.post("/v1/responses", json={"input": "a", "previous_response_id": f"resp_{long}"}),
        ann.http.post("/v1/responses", json={"input": "a", "conversation": f"conv_{long}"}),
        ann.http.post("/v1/chat/completions", json={"messages": [], "cache_salt": long}),
        ann.http.post("/v1/chat/completions", json={"messages": [], long: 1}),
        ann.http.post("/v1/conversations", json={"metadata": {long: "x"}}),
    ):
        assert answer.status_code in (400, 413), answer.text
        assert answer.json()["error"]["message"]
        assert len(answer.content) < 10_000


def test_what_is_kept_under_a_name_is_ones_own(ann: Tenant, eve: Tenant) -> None:
    ann.say(ann.http.post("/v1/sessions").json()["id"])
    assert ann.http.post("/slots/0?action=save", json={"filename": "talk"}).status_code == 200
    refused = eve.http.post("/slots/0?action=restore", json={"filename": "talk"})
    assert refused.status_code == 404
    eve.say(eve.http.post("/v1/sessions").json()["id"], "mine")
    assert eve.http.post("/slots/0?action=save", json={"filename": "talk"}).status_code == 200
    assert eve.http.post("/slots/0?action=erase").status_code == 200
    restored = ann.http.post("/slots/3?action=restore", json={"filename": "talk"}).json()
    assert restored["n_restored"] > 100


def test_an_archive_becomes_the_session_of_who_brings_it(ann: Tenant, eve: Tenant) -> None:
    session = ann.http.post("/v1/sessions", json={"name": "diary"}).json()["id"]
    ann.say(session)
    archive = ann.http.get(f"/v1/sessions/{session}/export").content
    brought = eve.http.post("/v1/sessions/import", content=archive)
    assert brought.status_code == 201
    assert brought.json()["id"] != session
    assert ann.http.get(f"/v1/sessions/{brought.json()['id']}").status_code == 404
    assert eve.cached() == 0  # its rows are that session's alone: who computed them is not known


def test_a_response_cannot_be_gone_on_from_by_another(ann: Tenant, eve: Tenant) -> None:
    made = ann.http.post("/v1/responses", json={"input": SECRET, "max_output_tokens": 16})
    assert made.status_code == 200, made.text
    parent = made.json()["id"]
    ask = {"input": "go on", "previous_response_id": parent, "max_output_tokens": 16}
    assert eve.http.post("/v1/responses", json=ask).status_code == 404
    assert eve.http.get(f"/v1/responses/{parent}").status_code == 404
    assert eve.http.delete(f"/v1/responses/{parent}").status_code == 404
    assert ann.http.post("/v1/responses", json=ask).status_code == 200


def test_a_key_that_was_revoked_opens_nothing_from_then_on(
    tmp_path_factory: pytest.TempPathFactory, make_backend: MakeBackend
) -> None:
    keys = ApiKeys(tmp_path_factory.mktemp("keys"))
    key, text = keys.create("ann")
    with served(make_backend(), keys=keys) as at:
        ann = Tenant(at.url, text)
        assert ann.http.get("/v1/sessions").status_code == 200
        keys.revoke(key.id)
        assert ann.http.get("/v1/sessions").status_code == 401
        ann.http.close()
