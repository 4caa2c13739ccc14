"""`tenuto top` before a real service and a real store: once for scripts, and in a real terminal."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.errors import ServiceUnreachable, UsageError
from sessions.keys import ApiKeys
from tests.cli.conftest import Tenuto
from tests.cli.ctrl_c import hear_ctrl_c
from tests.redis_server import free_port
from tests.sessions.service.test_serve import SHORT, Process, begin, serving


@pytest.fixture
def service(tiny: Path, tmp_path: Path) -> Iterator[Process]:
    with serving(tiny, tmp_path / "served") as process:
        begin(process)
        yield process


def say(process: Process, count: int = 1) -> None:
    with process.client() as client:
        for _ in range(count):
            client.post("/v1/sessions/talk/messages", json=SHORT).raise_for_status()


def test_once_as_json_is_for_scripts(tenuto: Tenuto, service: Process) -> None:
    say(service, 2)
    done = tenuto("top", service.url, "--once", "--json")
    assert done.code == 0, done.err
    found = done.json
    assert (found["url"], found["status"], found["running"], found["waiting"]) == (service.url, "ok", 0, 0)
    assert found["restores"] == {"new": 1, "exact": 1}
    assert 0 < found["hit_rate"] < 1
    assert found["memory"] > 0
    said = tenuto("top", service.url, "--once").out
    assert re.search(r"^restores +1 exact, 1 new$", said, re.MULTILINE)
    assert re.search(r"^turns +0 running, 0 waiting, 0 not saved$", said, re.MULTILINE)


def test_a_key_comes_from_the_environment_or_an_option(
    tenuto: Tenuto, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    _, key = ApiKeys(keys).create("ann")
    with serving(tiny, tmp_path / "served", "--keys", str(keys), "--operator", "ann") as process:
        refused = tenuto("top", process.url, "--once")
        assert refused.code == ServiceUnreachable.exit_code
        assert "an operator's API key is needed" in refused.err
        assert tenuto("top", process.url, "--once", "--api-key", key).code == 0
        monkeypatch.setenv("TENUTO_API_KEY", key)
        done = tenuto("top", process.url, "--once", "--json")
        assert done.code == 0
        assert key not in done.out


def test_without_an_address_the_store_is_watched(tenuto: Tenuto) -> None:
    assert tenuto("chat", "--name", "first", "--max-tokens", "4", stdin="hello\n").code == 0
    found = tenuto("top", "--once", "--json").json
    assert (found["num_sessions"], found["writing"], found["tenant"]) == (1, [], "default")
    assert found["nbytes"] > 0
    assert re.search(r"^sessions +1, 0 kept turns$", tenuto("top", "--once").out, re.MULTILINE)
    assert tenuto("top", "--once", "--json", "--tenant", "ann").json["num_sessions"] == 0


def test_what_makes_no_sense_is_refused(tenuto: Tenuto) -> None:
    for words in (("--json",), (), ("--once", "--interval", "0s"), ("nonsense", "--once")):
        assert tenuto("top", *words).code == UsageError.exit_code, words
    gone = tenuto("top", f"http://127.0.0.1:{free_port()}", "--once")
    assert gone.code == ServiceUnreachable.exit_code
    assert gone.err.count("\n") == 1


class Screen:
    """A terminal with `tenuto top` in it."""

    def __init__(self, *words: str) -> None:
        self._end, inside = pty.openpty()
        command = [sys.executable, "-m", "cli.main", "top", *words, "--interval", "0.2s"]
        env = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
        place = Path(__file__).parents[2]
        self.popen = subprocess.Popen(
            command,
            stdin=inside,
            stdout=inside,
            stderr=inside,
            env=env,
            cwd=place,
            preexec_fn=hear_ctrl_c,
        )
        os.close(inside)
        os.set_blocking(self._end, False)
        self.text = ""

    def until(self, done: Callable[[str], bool]) -> str:
        """What was shown, once it is as it should be."""
        deadline = time.monotonic() + 60
        while not done(self.text):
            assert time.monotonic() < deadline, self.text
            try:
                self.text += os.read(self._end, 65536).decode("utf-8", "replace")
            except BlockingIOError:
                time.sleep(0.02)
        return self.text

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait()
        os.close(self._end)


def test_it_refreshes_in_a_terminal_outlives_a_pause_and_ends_by_ctrl_c(service: Process) -> None:
    screen = Screen(service.url)
    try:
        screen.until(lambda text: "0 running" in text)
        say(service, 3)
        screen.until(lambda text: "2 exact, 1 new" in text)
        service.popen.kill()
        service.ended()
        screen.until(lambda text: "does not answer" in text)
        assert screen.popen.poll() is None
        screen.popen.send_signal(signal.SIGINT)
        assert screen.popen.wait(30) == 0
    finally:
        screen.close()
