"""`tenuto serve`, as a process: how it starts, whom it refuses, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from sessions.keys import ApiKeys
from sessions.manager import SessionManager
from sessions.stores.disk import DiskStore
from tests.sessions.service.serving import events

LONG = {"messages": [{"role": "user", "content": "on and on"}], "stream": True, "max_tokens": 6000}
SHORT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


@dataclass
class Process:
    """A service of its own; its log is in `log`."""

    popen: subprocess.Popen[str]
    url: str
    log: Path

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    def terminate(self) -> None:
        self.popen.send_signal(signal.SIGTERM)

    def ended(self, seconds: float = 60) -> int:
        return self.popen.wait(seconds)


@dataclass
class Stream:
    """A turn that is heard in a thread of its own."""

    process: Process
    session: str
    heard: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    began: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._listen)
        self.thread.start()
        assert self.began.wait(60)

    def _listen(self) -> None:
        path = f"/v1/sessions/{self.session}/messages"
        with self.process.client() as client, client.stream("POST", path, json=LONG) as answer:
            try:
                for event in events(answer.iter_lines()):
                    self.heard.append(event)
                    if event[0] == "piece":
                        self.began.set()
            except httpx.TransportError:
                pass

    def whole(self) -> dict[str, Any]:
        self.thread.join(60)
        name, data = self.heard[-1]
        assert name == "ended", self.heard[-1]
        return data


def command(model: Path, store: Path, *options: str) -> list[str]:
    given = ["--model", str(model), "--store", str(store), "--port", "0", "--threads", "1", "--ctx", "8192"]
    return [sys.executable, "-m", "cli.main", "serve", *given, *options]


@contextmanager
def serving(model: Path, store: Path, *options: str) -> Iterator[Process]:
    log = store.parent / f"log-{time.monotonic_ns()}"
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            command(model, store, *options),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[3],
        ) as popen,
    ):
        try:
            assert popen.stdout is not None
            line = popen.stdout.readline()
            assert " at http://127.0.0.1:" in line, (line, log.read_text())
            yield Process(popen, line.split()[-1], log)
        finally:
            popen.kill()


def begin(process: Process, name: str = "talk") -> str:
    with process.client() as client:
        answer = client.post("/v1/sessions", json={"name": name})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])


def test_it_ends_by_sigterm_once_its_turns_have_ended_and_are_saved(tiny_path: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with serving(tiny_path, store, "--drain", "0.5s") as process:
        stream = Stream(process, begin(process))
        process.terminate()
        time.sleep(0.2)
        with process.client() as client:
            refused = client.post("/v1/sessions/talk/messages", json=SHORT)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert refused.headers["retry-after"]
            assert client.get("/health").status_code == 503
        told = stream.whole()
        assert told["reply"]["finish"] == "cancelled"
        assert told["saved"] is not None
        assert process.ended() == 0
    with closing(DiskStore(store, "default")) as disk:
        manager = SessionManager(disk)
        manager.open("talk").close()  # its lease was given back: nobody has to wait for it
        said = manager.manifest("talk").messages
        assert [message.role for message in said] == ["user", "assistant"]
        assert said[-1].text == told["reply"]["content"]


def test_a_turn_that_ends_in_time_is_not_cut_off(tiny_path: Path, tmp_path: Path) -> None:
    with serving(tiny_path, tmp_path / "store", "--drain", "60s") as process:
        begin(process)
        done: list[httpx.Response] = []

        def ask() -> None:
            with process.client() as client:
                done.append(client.post("/v1/sessions/talk/messages", json={**SHORT, "max_tokens": 300}))

        asking = threading.Thread(target=ask)
        asking.start()
        time.sleep(0.2)
        process.terminate()
        asking.join(60)
        assert done[0].json()["reply"]["finish"] in ("length", "eos")
        assert process.ended() == 0


def test_a_second_signal_ends_it_at_once(tiny_path: Path, tmp_path: Path) -> None:
    with serving(tiny_path, tmp_path / "store", "--drain", "60s") as process:
        stream = Stream(process, begin(process))
        process.terminate()
        time.sleep(0.5)
        started = time.monotonic()
        process.terminate()
        assert process.ended() == -signal.SIGTERM
        assert time.monotonic() - started < 5
        stream.thread.join(60)


def test_a_session_that_another_process_talks_in_is_423_with_who_and_until_when(
    tiny_path: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    with serving(tiny_path, store) as one, serving(tiny_path, store, "--patience", "0.1") as other:
        stream = Stream(one, begin(one))
        with other.client() as client:
            for verb in ("messages", "regenerate", "rewind"):
                answer = client.post(f"/v1/sessions/talk/{verb}", json=SHORT if verb == "messages" else {})
                assert answer.status_code == 423, (verb, answer.text)
                error = answer.json()["error"]
                assert error["code"] == "lease_held"
                assert str(one.popen.pid) in error["details"]["holder"]
                assert error["details"]["until"] > time.time()
                assert answer.headers["retry-after"]
            assert client.get("/v1/sessions/talk").status_code == 200
            one.popen.kill()
            one.ended()
        stream.thread.join(60)


def test_two_processes_take_turns_in_one_session(tiny_path: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with serving(tiny_path, store) as one, serving(tiny_path, store) as other:
        session = begin(one)
        tag = None
        for turn in range(6):
            with (one if turn % 2 else other).client() as client:
                headers = {} if tag is None else {"if-match": tag}
                answer = client.post(f"/v1/sessions/{session}/messages", json=SHORT, headers=headers)
                assert answer.status_code == 200, answer.text
                tag = answer.headers["etag"]
                if turn:
                    assert answer.headers["x-tenuto-reason"] == "exact"
                    assert answer.headers["x-tenuto-recomputed-tokens"] == "0"
        with one.client() as client:
            assert client.get(f"/v1/sessions/{session}").json()["turns"] == 6


def test_once_there_is_a_key_every_request_is_asked_for_one(tiny_path: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    _, text = ApiKeys(keys).create("ann")
    with serving(tiny_path, tmp_path / "store", "--keys", str(keys), "--operator", "ann") as process:
        with process.client() as client:
            assert client.get("/v1/sessions").status_code == 401
            assert client.get("/health").status_code == 200
            client.headers["authorization"] = f"Bearer {text}"
            assert client.post("/v1/sessions", json={"name": "mine"}).status_code == 201
            assert client.get("/metrics").status_code == 200
        process.terminate()
        assert process.ended() == 0
        assert text not in process.log.read_text()
    with closing(DiskStore(tmp_path / "store", "ann")) as disk:
        assert [session.name for session in SessionManager(disk).list()] == ["mine"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_without_keys_it_listens_to_nobody_elsewhere(tiny_path: Path, tmp_path: Path, host: str) -> None:
    done = subprocess.run(
        command(tiny_path, tmp_path / "store", "--host", host), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "needs API keys" in done.stderr


def test_a_port_that_is_taken_is_one_line(tiny_path: Path, tmp_path: Path) -> None:
    with serving(tiny_path, tmp_path / "store") as process:
        port = process.url.rpartition(":")[2]
        done = subprocess.run(
            command(tiny_path, tmp_path / "store", "--port", port), capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert "cannot listen" in done.stderr
        process.terminate()
        assert process.ended() == 0
