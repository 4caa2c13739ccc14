"""A watched service is told as it is: what it counted, and what it did between two looks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from engine.errors import ServiceUnreachable, UsageError
from sessions.keys import ApiKeys
from sessions.lease import acquire
from sessions.manager import SessionManager
from sessions.names import new_session_id
from sessions.service.config import ServiceConfig
from sessions.service.watch import Watch, Watched, rates
from sessions.stores.disk import DiskStore
from sessions.stores.memory import MemoryStore
from sessions.watch import StoreWatch
from tests.redis_server import free_port
from tests.sessions.service.conftest import MakeBackend
from tests.sessions.service.serving import Served, served

SHORT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


def say(at: Served, times: int = 1) -> None:
    for _ in range(times):
        at.client.post("/v1/sessions/talk/messages", json=SHORT).raise_for_status()


@pytest.fixture
def talk(at: Served) -> Served:
    at.client.post("/v1/sessions", json={"name": "talk"}).raise_for_status()
    return at


def test_a_service_that_did_nothing_yet(at: Served) -> None:
    found = Watch(at.url).look()
    assert (found.status, found.running, found.waiting, found.prompt_tokens) == ("ok", 0, 0, 0)
    assert found.hit_rate is found.decode_speed is found.mean_save is None
    assert found.model == at.client.get("/v1/models").json()["data"][0]["id"]
    assert found.memory is not None
    assert found.memory > 50_000_000  # torch alone


def test_turns_restores_and_tokens_are_those_of_the_answers(talk: Served) -> None:
    watch = Watch(talk.url + "/")
    before = watch.look()
    answers = [talk.client.post("/v1/sessions/talk/messages", json=SHORT) for _ in range(3)]
    told = [answer.json() for answer in answers]
    now = watch.look()
    assert now.prompt_tokens == sum(each["prompt_tokens"] for each in told)
    restored = sum(int(answer.headers["x-tenuto-restored-tokens"]) for answer in answers)
    assert now.restored_tokens == restored > 0
    assert now.hit_rate == restored / now.prompt_tokens
    assert dict(now.restores) == {"new": 1, "exact": 2}
    assert now.reply_tokens == sum(each["reply"]["tokens"] for each in told)
    assert now.decode_speed is not None
    assert now.mean_save is not None
    assert now.saved_bytes > 0
    gained = rates(before, now)
    assert gained is not None
    assert gained.restores * gained.seconds == pytest.approx(3)
    assert gained.reply_tokens * gained.seconds == pytest.approx(now.reply_tokens)
    assert gained.prompt_tokens * gained.seconds == pytest.approx(now.prompt_tokens - restored)


def test_a_service_that_began_anew_has_no_rates(talk: Served) -> None:
    say(talk)
    found = Watch(talk.url).look()
    assert rates(found, replace(found, at=found.at + 1, reply_tokens=0)) is None
    assert rates(found, found) is None


def test_where_there_are_keys_an_operators_is_needed(make_backend: MakeBackend, tmp_path: Path) -> None:
    keys = ApiKeys(tmp_path / "keys")
    (_, hers), (_, his) = keys.create("ann"), keys.create("bob")
    with served(make_backend(), ServiceConfig(operators=("ann",)), keys) as at:
        assert Watch(at.url, hers).look().status == "ok"
        for key in (None, his, "tnt_nobody"):
            with pytest.raises(ServiceUnreachable, match="an operator's API key is needed"):
                Watch(at.url, key).look()


def test_one_that_is_being_ended_says_so(make_backend: MakeBackend) -> None:
    backend = make_backend()
    with served(backend) as at:
        backend.drain(0.0)
        assert Watch(at.url).look().status == "draining"


@contextmanager
def answering(status: int, body: bytes, location: str | None = None) -> Iterator[str]:
    """A server of somebody else's."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            if location is not None:
                self.send_header("location", location)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'"ok"', b"{}", b"\xff\xfe"])
def test_who_is_no_service_of_ours_is_an_error(body: bytes) -> None:
    with answering(200, body) as url, pytest.raises(ServiceUnreachable):
        Watch(url).look()


def test_nobody_there_is_an_error_and_a_key_follows_no_redirection(at: Served) -> None:
    with pytest.raises(ServiceUnreachable, match="does not answer"):
        Watch(f"http://127.0.0.1:{free_port()}").look()
    with (
        answering(302, b"", at.url + "/health") as url,
        pytest.raises(ServiceUnreachable, match="status 302"),
    ):
        Watch(url, "tnt_secret").look()


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8080", "ftp://host", "file:///etc/passwd", "http://", "http://a/?b"]
)
def test_what_is_no_address_of_a_service_is_refused(url: str) -> None:
    with pytest.raises(UsageError):
        Watch(url)


def test_a_look_is_data_of_its_own(at: Served) -> None:
    assert isinstance(Watch(at.url).look(), Watched)


# --- a store --------------------------------------------------------------------------------------


def test_a_watched_store_tells_who_writes_and_what_was_saved(
    manager: SessionManager, store: DiskStore
) -> None:
    watch = StoreWatch(store)
    assert (watch.look().num_sessions, watch.look().writing) == (0, ())
    session = manager.create("one")
    seq = manager.engine.create()
    manager.engine.feed(seq, [1, 2, 3])
    manager.save(session, seq, ())
    manager.pin("one", "kept")
    now = watch.look()
    assert (now.num_sessions, now.num_pins, now.saved) == (1, 1, 1)
    assert [each.session for each in now.writing] == [session.id]
    assert now.writing[0].seconds > 0
    assert now.nbytes == store.usage()
    session.close()
    again = watch.look()
    assert (again.saved, again.writing) == (0, ())
    with acquire(store, session.id, "somebody"):
        assert [each.holder for each in watch.look().writing] == ["somebody"]


def test_a_lease_that_ended_is_nobodys() -> None:
    clock = [1_000_000.0]
    store = MemoryStore(clock=lambda: clock[0])
    watch = StoreWatch(store)
    acquire(store, new_session_id(), "who was killed", 10)
    assert len(watch.look().writing) == 1
    clock[0] += 11
    assert watch.look().writing == ()
