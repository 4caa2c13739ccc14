"""The chat's own commands, and what it does when saving fails."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import pytest

from engine.errors import LeaseHeld, StoreFull
from sessions.manager import SessionManager
from tests.cli.conftest import Tenuto
from tests.cli.ctrl_c import hear_ctrl_c

SHORT = ("--max-tokens", "8")


def chat(tenuto: Tenuto, *lines: str) -> tuple[str, str]:
    done = tenuto("chat", "--name", "talk", *SHORT, stdin="".join(f"{line}\n" for line in lines))
    assert done.code == 0, done.err
    return done.out, done.err


def turns(tenuto: Tenuto, session: str = "talk") -> list[str]:
    messages = tenuto("show", session, "--json").json["messages"]
    return [message["text"] for message in messages if message["role"] == "user"]


def test_rewind_edit_and_regen_change_what_was_said(tenuto: Tenuto) -> None:
    chat(tenuto, "one", "two", "/rewind", "three", "/edit four", "/regen")
    assert turns(tenuto) == ["one", "four"]


def test_save_with_a_name_is_a_turn_that_load_goes_on_from(tenuto: Tenuto) -> None:
    _, err = chat(tenuto, "one", "/save kept", "two", "/load kept", "three", "/info")
    assert "recomputed 0" in err
    assert turns(tenuto) == ["one", "two"]
    newest = tenuto("ls", "--json").json["sessions"][0]
    assert turns(tenuto, newest["id"]) == ["one", "three"]


def test_fork_leaves_the_chat_where_it_is(tenuto: Tenuto) -> None:
    chat(tenuto, "one", "/fork other", "two")
    assert turns(tenuto) == ["one", "two"]
    assert turns(tenuto, "other") == ["one"]


def test_clear_begins_a_new_session(tenuto: Tenuto) -> None:
    chat(tenuto, "one", "/clear", "two")
    assert sorted(info["turns"] for info in tenuto("ls", "--json").json["sessions"]) == [1, 1]


def test_three_quotes_hold_several_lines_together(tenuto: Tenuto) -> None:
    chat(tenuto, '"""one', "two", 'three"""')
    assert turns(tenuto) == ["one\ntwo\nthree"]


def test_wrong_commands_are_told_and_the_chat_goes_on(tenuto: Tenuto, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.touch()
    _, err = chat(tenuto, "/nope", "/load nope", "/rewind 9", "/edit", f"/export {taken}", "one")
    assert err.count("tenuto: ") == 5
    assert turns(tenuto) == ["one"]


def test_a_failed_save_is_said_at_each_turn_and_loses_nothing(
    tenuto: Tenuto, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    left = [2]
    save = SessionManager.save

    def full(*args: object, **kwargs: object) -> object:
        if left[0]:
            left[0] -= 1
            raise StoreFull("no room left on the device")
        return save(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(SessionManager, "save", full)
    out = tmp_path / "rescued.tenuto"
    _, err = chat(tenuto, "one", "two", f"/export {out}", "three")
    assert err.count("not saved: no room left on the device") == 2
    assert turns(tenuto) == ["one", "two", "three"]
    name = tenuto("import", str(out)).out.strip()
    assert turns(tenuto, name) == ["one", "two"]


def test_a_pipe_that_ends_unsaved_gets_the_error(tenuto: Tenuto, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> object:
        raise StoreFull("no room")

    monkeypatch.setattr(SessionManager, "save", full)
    assert tenuto("chat", *SHORT, stdin="one\n").code == StoreFull.exit_code


class Terminal:
    """A chat at a pseudo-terminal, in a process of its own; it is gone when the `with` ends."""

    def __init__(self, *arguments: str) -> None:
        self._fd, theirs = pty.openpty()
        line = "from cli.main import main; main()"
        command = [sys.executable, "-c", line, *arguments]
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=hear_ctrl_c,
        )
        os.close(theirs)
        self._seen = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError):
            os.close(self._fd)

    def until(self, pattern: str) -> None:
        """Waits until `pattern` is seen, and forgets all up to its end."""
        deadline = time.monotonic() + 60
        while (found := re.search(pattern, self._seen)) is None:
            assert time.monotonic() < deadline, self._seen
            if select.select([self._fd], [], [], 1)[0]:
                try:
                    self._seen += os.read(self._fd, 4096).decode("utf-8", "replace")
                except OSError:  # how Linux says that the other side is gone
                    pytest.fail(f"it ended before it said {pattern!r}: {self._seen}")
        self._seen = self._seen[found.end() :]

    def begin_reply(self) -> None:
        """Says something that is answered without end, and waits for the first words."""
        self.until(">>> ")
        os.write(self._fd, b"one\n")
        self.until(r"one\r\n[^\r]")

    def interrupt_prompt(self) -> None:
        """Ctrl-C at the prompt. One that comes just while readline prints it is noticed only with the
        next key (CPython checks for signals before it waits, not while), so not that fast."""
        self.until(">>> ")
        time.sleep(0.5)
        self.process.send_signal(signal.SIGINT)

    def hang_up(self) -> None:
        self.process.send_signal(signal.SIGHUP)
        os.close(self._fd)


#: The likeliest token of the tiny model is never an end, so that its reply goes on until it is stopped.
ENDLESS = ("chat", "--name", "talk", "--temp", "0")


def test_ctrl_c_keeps_what_was_said_and_twice_at_the_prompt_leaves(tenuto: Tenuto) -> None:
    with Terminal(*ENDLESS) as terminal:
        terminal.begin_reply()
        terminal.process.send_signal(signal.SIGINT)
        terminal.until(r"\[stopped")
        terminal.interrupt_prompt()
        terminal.until("again")
        terminal.interrupt_prompt()
        assert terminal.process.wait(20) == 0
    messages = tenuto("show", "talk", "--json").json["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert messages[1]["text"]


def test_a_closed_terminal_in_the_middle_of_a_reply_loses_nothing(tenuto: Tenuto) -> None:
    with Terminal(*ENDLESS) as terminal:
        terminal.begin_reply()
        terminal.hang_up()
        assert terminal.process.wait(20) != 0
    assert tenuto("show", "talk", "--json").json["messages"][1]["text"]
    assert "recomputed 0" in tenuto("chat", "-c").err


def test_a_second_process_is_told_who_holds_the_session(tenuto: Tenuto) -> None:
    tenuto("chat", "--name", "talk", *SHORT, stdin="one\n")
    with Terminal("chat", "--session", "talk") as terminal:
        terminal.until(">>> ")
        done = tenuto("resume", "talk", "-p", "two", *SHORT)
        assert done.code == LeaseHeld.exit_code
        assert f"pid {terminal.process.pid}" in done.err
