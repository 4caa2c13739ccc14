"""Sessions over HTTP, on a real engine and a real store."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sessions.service.backend import BackendConfig
from tests.sessions.service.conftest import MakeBackend
from tests.sessions.service.serving import Served, events, served


def ask(text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 8, **fields}


def begin(at: Served, **fields: Any) -> str:
    answer = at.client.post("/v1/sessions", json=fields)
    assert answer.status_code == 201, answer.text
    assert answer.headers["location"] == f"/v1/sessions/{answer.json()['id']}"
    return str(answer.json()["id"])


def say(at: Served, session: str, text: str = "hello", **fields: Any) -> httpx.Response:
    answer = at.client.post(f"/v1/sessions/{session}/messages", json=ask(text, **fields))
    assert answer.status_code == 200, answer.text
    return answer


def test_a_session_is_begun_talked_in_shown_and_deleted(at: Served) -> None:
    session = begin(at, name="tea", title="about tea", system="be brief")
    first = say(at, session, "green or black?")
    assert first.headers["x-tenuto-reason"] in ("new", "exact", "prefix")
    second = say(at, "tea", "and why?")
    assert int(second.headers["x-tenuto-restored-tokens"]) > 0
    assert second.headers["x-tenuto-recomputed-tokens"] == "0"
    shown = at.client.get("/v1/sessions/tea")
    assert shown.headers["etag"] == second.headers["etag"] == f'"{shown.json()["etag"]}"'
    told = shown.json()
    assert (told["id"], told["name"], told["title"], told["turns"]) == (session, "tea", "about tea", 2)
    assert [m["role"] for m in told["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert told["messages"][2]["content"] == first.json()["reply"]["content"]
    assert at.client.delete(f"/v1/sessions/{session}").status_code == 204
    assert at.client.get("/v1/sessions/tea").status_code == 404
    assert at.client.delete(f"/v1/sessions/{session}").status_code == 404


def test_a_list_has_pages_and_can_be_searched(at: Served) -> None:
    made = [begin(at, title=f"talk {number}") for number in range(5)]
    first = at.client.get("/v1/sessions?limit=2").json()
    rest = at.client.get("/v1/sessions", params={"limit": 100, "after": first["after"]}).json()
    assert [each["id"] for each in (*first["data"], *rest["data"])] == made[::-1]
    assert rest["after"] is None
    assert "messages" not in first["data"][0]
    found = at.client.get("/v1/sessions?containing=talk 3").json()["data"]
    assert [each["id"] for each in found] == [made[3]]


def test_a_name_is_taken_once_and_can_be_changed(at: Served) -> None:
    session, other = begin(at, name="tea"), begin(at)
    assert at.client.post("/v1/sessions", json={"name": "tea"}).status_code == 409
    assert at.client.patch(f"/v1/sessions/{other}", json={"name": "tea"}).status_code == 409
    assert at.client.patch(f"/v1/sessions/{session}", json={"name": "coffee"}).json()["name"] == "coffee"
    assert at.client.patch(f"/v1/sessions/{other}", json={"name": "tea"}).status_code == 200
    assert at.client.patch(f"/v1/sessions/{other}", json={"name": None}).json()["name"] is None
    assert at.client.get("/v1/sessions/tea").status_code == 404


def test_a_known_etag_is_304(at: Served) -> None:
    session = begin(at)
    tag = at.client.get(f"/v1/sessions/{session}").headers["etag"]
    for known in (tag, f"W/{tag}", f'"x", {tag}', "*"):
        answer = at.client.get(f"/v1/sessions/{session}", headers={"if-none-match": known})
        assert (answer.status_code, answer.content) == (304, b"")
    say(at, session)
    assert at.client.get(f"/v1/sessions/{session}", headers={"if-none-match": tag}).status_code == 200


@pytest.mark.parametrize("verb", ["messages", "regenerate", "edit", "rewind", "fork", "rename", "delete"])
def test_a_stale_writer_gets_412_and_changes_nothing(at: Served, verb: str) -> None:
    session = begin(at)
    stale = say(at, session).headers["etag"]
    now = say(at, session).headers["etag"]
    bodies: dict[str, Any] = {"messages": ask(), "edit": {"content": "no", "max_tokens": 4}}

    def write(tag: str) -> httpx.Response:
        headers, path = {"if-match": tag}, f"/v1/sessions/{session}"
        match verb:
            case "rename":
                return at.client.patch(path, json={"name": "x"}, headers=headers)
            case "delete":
                return at.client.delete(path, headers=headers)
        return at.client.post(f"{path}/{verb}", json=bodies.get(verb, {}), headers=headers)

    assert write(stale).status_code == 412
    assert at.client.get(f"/v1/sessions/{session}").headers["etag"] == now
    assert write(now).status_code < 300


def test_of_many_writers_that_expect_one_turn_one_wins(at: Served) -> None:
    session = begin(at)
    tag = say(at, session).headers["etag"]
    statuses: list[int] = []

    def write() -> None:
        answer = httpx.post(
            f"{at.url}/v1/sessions/{session}/messages", json=ask(), headers={"if-match": tag}, timeout=60
        )
        statuses.append(answer.status_code)

    writers = [threading.Thread(target=write) for _ in range(6)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert statuses.count(200) == 1
    assert set(statuses) <= {200, 412, 423}
    assert at.client.get(f"/v1/sessions/{session}").json()["turns"] == 2


def test_a_fork_goes_its_own_way(at: Served) -> None:
    session = begin(at)
    say(at, session, "one")
    say(at, session, "two")
    fork = at.client.post(f"/v1/sessions/{session}/fork", json={"name": "branch", "turns_back": 1})
    assert fork.status_code == 201
    assert (fork.json()["parent"], fork.json()["turns"]) == (session, 1)
    say(at, "branch", "three")
    assert next(m["content"] for m in fork.json()["messages"]) == "one"
    assert at.client.get(f"/v1/sessions/{session}").json()["messages"][2]["content"] == "two"
    assert at.client.get("/v1/sessions/branch").json()["messages"][2]["content"] == "three"


def test_a_rewind_takes_turns_back_and_says_what_was_restored(at: Served) -> None:
    session = begin(at)
    first = say(at, session, "one").headers["etag"]
    say(at, session, "two")
    answer = at.client.post(f"/v1/sessions/{session}/rewind")
    assert answer.status_code == 200
    assert answer.json()["session"]["turns"] == 1
    assert answer.headers["x-tenuto-reason"] == answer.json()["restored"]["reason"]
    assert answer.headers["etag"] not in (first, None)
    refused = at.client.post(f"/v1/sessions/{session}/rewind", json={"turns": 2})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "usage_error")


def test_a_reply_can_be_said_anew_and_a_question_asked_otherwise(at: Served) -> None:
    session = begin(at)
    first = say(at, session, "one", sampler={"seed": 1, "temperature": 1.0}).json()["reply"]["content"]
    again = at.client.post(
        f"/v1/sessions/{session}/regenerate", json={"max_tokens": 8, "sampler": {"seed": 2}}
    ).json()["reply"]["content"]
    assert again != first
    told = at.client.get(f"/v1/sessions/{session}").json()
    assert [m["content"] for m in told["messages"]] == ["one", again]
    assert (told["sampler"]["seed"], told["sampler"]["temperature"]) == (2, 1.0)
    answer = at.client.post(f"/v1/sessions/{session}/edit", json={"content": "uno", "max_tokens": 8})
    assert answer.status_code == 200
    assert at.client.get(f"/v1/sessions/{session}").json()["messages"][0]["content"] == "uno"


def test_the_events_of_a_stream_are_what_the_json_says(at: Served) -> None:
    session, other = begin(at), begin(at)
    whole = say(at, session).json()
    answer = at.client.post(f"/v1/sessions/{other}/messages", json=ask(stream=True))
    told = list(events(iter(answer.text.splitlines())))
    assert "".join(data["text"] for name, data in told if name == "piece") == whole["reply"]["content"]
    assert told[-1][1]["reply"] == whole["reply"]
    assert told[-1][1]["etag"] == at.client.get(f"/v1/sessions/{other}").json()["etag"]


def test_a_client_that_leaves_ends_its_reply_and_the_session_goes_on_from_what_was_said(at: Served) -> None:
    session = begin(at)
    with at.client.stream(
        "POST", f"/v1/sessions/{session}/messages", json=ask(stream=True, max_tokens=1500)
    ) as answer:
        heard = 0
        for name, _ in events(answer.iter_lines()):
            heard += name == "piece"
            if heard == 3:
                break
    line = at.logged(2)[-1]
    assert line["saved"] is True
    assert 3 <= line["reply_tokens"] < 1000
    told = at.client.get(f"/v1/sessions/{session}").json()
    assert [m["role"] for m in told["messages"]] == ["user", "assistant"]
    after = say(at, session, "go on")
    assert after.headers["x-tenuto-recomputed-tokens"] == "0"


def test_nothing_but_time_changes_when_the_service_starts_anew(make_backend: MakeBackend) -> None:
    replies: list[list[str]] = []
    for restarts in (False, True):
        said, backend = [], make_backend(deterministic=True)
        with served(backend) as at:
            session = begin(at, sampler={"seed": 7, "temperature": 0.8})
            said.append(say(at, session, "one").json()["reply"]["content"])
            if not restarts:
                said.append(say(at, session, "two").json()["reply"]["content"])
        if restarts:
            backend.close()
            with served(make_backend(deterministic=True)) as at:
                answer = say(at, session, "two")
                assert answer.headers["x-tenuto-reason"] == "exact"
                assert answer.headers["x-tenuto-recomputed-tokens"] == "0"
                said.append(answer.json()["reply"]["content"])
        replies.append(said)
    assert replies[0] == replies[1]


def test_a_session_leaves_as_a_stream_and_comes_back_as_one(at: Served) -> None:
    session = begin(at)
    said = say(at, session, "hello " * 50).json()
    with at.client.stream("GET", f"/v1/sessions/{session}/export") as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/vnd.tenuto"
        assert answer.headers["content-disposition"] == f'attachment; filename="{session}.tenuto"'
        archive = b"".join(answer.iter_bytes())

    def pieces() -> Iterator[bytes]:
        for at_byte in range(0, len(archive), 5000):
            yield archive[at_byte : at_byte + 5000]

    back = at.client.post("/v1/sessions/import?name=back", content=pieces())
    assert back.status_code == 201, back.text
    assert back.json()["id"] != session
    assert back.json()["messages"][-1]["content"] == said["reply"]["content"]
    assert say(at, "back", "go on").headers["x-tenuto-recomputed-tokens"] == "0"


def test_a_damaged_archive_is_400_and_leaves_nothing(at: Served) -> None:
    session = begin(at)
    say(at, session)
    archive = at.client.get(f"/v1/sessions/{session}/export").content
    for bad in (b"", b"x", archive[:-1], archive[: len(archive) // 2], archive + b"x", _flipped(archive)):
        answer = at.client.post("/v1/sessions/import", content=bad)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["code"] in ("corrupt", "unknown_version", "limit_exceeded")
    assert len(at.client.get("/v1/sessions").json()["data"]) == 1


def _flipped(archive: bytes) -> bytes:
    middle = len(archive) // 2
    return archive[:middle] + bytes([archive[middle] ^ 1]) + archive[middle + 1 :]


def test_a_save_of_what_is_saved_writes_nothing(at: Served) -> None:
    session = begin(at)
    tag = say(at, session).headers["etag"]
    answer = at.client.post(f"/v1/sessions/{session}/save")
    assert (answer.status_code, answer.json()["saved"], answer.headers["etag"]) == (200, None, tag)


def test_downloads_that_nobody_takes_keep_no_one_waiting(at: Served) -> None:
    session = begin(at)
    say(at, session, "hello " * 200)
    host, port = at.url.removeprefix("http://").split(":")
    lines = [socket.create_connection((host, int(port))) for _ in range(20)]
    try:
        for line in lines:
            line.sendall(f"GET /v1/sessions/{session}/export HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
        assert at.client.get("/v1/sessions", timeout=20).status_code == 200
    finally:
        for line in lines:
            line.close()


def test_a_turn_that_finds_no_place_is_429_and_told_when_to_come_again(make_backend: MakeBackend) -> None:
    with served(make_backend(BackendConfig(max_turns=1, max_waiting=0))) as at:
        session, other = begin(at), begin(at)
        path = f"/v1/sessions/{session}/messages"
        with at.client.stream("POST", path, json=ask(stream=True, max_tokens=1500)) as answer:
            told = events(answer.iter_lines())  # which closes the answer when it is forgotten
            next(told)
            refused = httpx.post(f"{at.url}/v1/sessions/{other}/messages", json=ask(), timeout=60)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "busy")
            assert int(refused.headers["retry-after"]) >= 1
        at.logged(4)
        assert say(at, other).status_code == 200


def test_what_is_stored_is_told_to_the_byte_and_gc_only_planned(at: Served) -> None:
    session, other = begin(at), begin(at)
    say(at, session)
    say(at, other)
    at.client.delete(f"/v1/sessions/{other}")
    at.client.post("/slots/0?action=save", json={"filename": "kept"})
    told = at.client.get("/v1/storage").json()
    parts = ("rows_bytes", "manifest_bytes", "superseded_bytes", "index_bytes")
    assert sum(told[part] for part in parts) == told["total_bytes"]
    assert told["rows_bytes"] > 0
    assert told["superseded_bytes"] > 0
    assert told["kept"] == ["kept"]
    plan = at.client.get("/v1/storage/gc").json()
    assert plan == {"object": "gc.plan", "expired": [], "released": [], "num_blobs": 0, "nbytes": 0}
    assert at.client.get("/v1/storage").json() == told
