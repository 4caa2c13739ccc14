"""Input that is no text, streams that are closed or full, paths that are none: a line each, and no loss."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import Corrupt, ProblemsFound, TenutoError, UsageError
from sessions.manager import SessionManager
from tests.cli.conftest import Tenuto

SHORT = ("--max-tokens", "8")
MAIN = (sys.executable, "-c", "from cli.main import main; main()")


def run(
    *arguments: str, stdin: bytes = b"", shell: str = "", **environment: str
) -> subprocess.CompletedProcess[bytes]:
    """A process of its own; `shell` says how its streams are redirected."""
    command = ["bash", "-c", f'"$@" {shell}', "bash", *MAIN, *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, env={**os.environ, **environment})


@pytest.mark.parametrize("encoding", ["utf-8:strict", "utf-8:surrogateescape", "ascii:strict"])
def test_bytes_that_are_no_text_do_not_keep_a_chat_from_being_saved(tenuto: Tenuto, encoding: str) -> None:
    done = run("chat", "--name", "talk", *SHORT, stdin=b"a\xffb\nand then?\n", PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr
    messages = tenuto("show", "talk", "--json").json["messages"]
    assert [m["text"] for m in messages if m["role"] == "user"] == ["a\ufffdb", "and then?"]


def test_an_argument_that_is_no_text_does_not_either(tenuto: Tenuto) -> None:
    assert run("chat", "--name", "talk", "--system", "s\udcff", *SHORT, stdin=b"hello\n").returncode == 0
    assert run("resume", "talk", "-p", "x\udcff", *SHORT).returncode == 0
    messages = tenuto("show", "talk", "--json").json["messages"]
    assert [m["text"] for m in messages if m["role"] != "assistant"] == ["s\ufffd", "hello", "x\ufffd"]


@pytest.mark.parametrize("shell", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_an_empty_one(tenuto: Tenuto, shell: str) -> None:
    done = run("chat", *SHORT, stdin=b"hello\n", shell=shell)
    assert (done.returncode, done.stderr.count(b"tenuto:")) == (0, 0)


@pytest.mark.parametrize("command", [("ls",), ("ls", "--json"), ("show", "talk")])
def test_output_that_finds_no_room_is_one_line_and_an_exit_code(
    tenuto: Tenuto, command: tuple[str, ...]
) -> None:
    tenuto("chat", "--name", "talk", *SHORT, stdin="hello\n")
    done = run(*command, shell=">/dev/full")
    assert done.returncode == TenutoError.exit_code
    assert done.stderr.decode().splitlines() in (
        ["tenuto: stdout: No space left on device"],
        ["tenuto: No space left on device"],
    )


def test_a_reply_is_said_in_what_the_terminal_can_show(tenuto: Tenuto) -> None:
    assert run("run", "hello", *SHORT, PYTHONIOENCODING="ascii:strict").returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls", "--nope"],
        ["show"],
        ["nope"],
        ["gc", "--grace", "soon"],
        ["chat", "--json"],
        ["ls", "--store", "~nobody-of-that-name/x"],
        ["run", "x", "-m", "~nobody-of-that-name/x"],
    ],
)
def test_wrong_usage_is_one_line(tenuto: Tenuto, arguments: list[str]) -> None:
    done = tenuto(*arguments)
    assert (done.code, done.out) == (UsageError.exit_code, "")
    assert done.err.startswith("tenuto: ")
    assert done.err.count("\n") == 1


def test_paths_that_cannot_be_do_not_end_a_chat(tenuto: Tenuto, tmp_path: Path) -> None:
    lines = ("/export a\0b", "/export ~nobody-of-that-name/x", f"/export {tmp_path}", "one")
    done = tenuto("chat", "--name", "talk", *SHORT, stdin="".join(f"{line}\n" for line in lines))
    assert (done.code, done.err.count("tenuto: ")) == (0, 3)
    assert tenuto("show", "talk").code == 0


def test_a_device_is_never_replaced_by_an_archive(tenuto: Tenuto) -> None:
    tenuto("chat", "--name", "talk", *SHORT, stdin="hello\n")
    done = tenuto("export", "talk", "/dev/null", "--force")
    assert (done.code, done.err) == (UsageError.exit_code, "tenuto: /dev/null is no regular file\n")
    assert not Path("/dev/null").is_file()


def test_a_damaged_manifest_is_told_and_the_others_are_listed(tenuto: Tenuto, tmp_path: Path) -> None:
    tenuto("chat", "--name", "bad", *SHORT, stdin="hello\n")
    (path,) = [
        path for path in (tmp_path / "store").rglob("*") if path.is_file() and "/manifest/" in str(path)
    ]
    tenuto("chat", "--name", "good", *SHORT, stdin="hello\n")
    path.write_bytes(b"junk")
    done = tenuto("ls", "--json")
    assert done.code == ProblemsFound.exit_code
    assert [info["name"] for info in done.json["sessions"]] == ["good"]
    assert len(done.json["unreadable"]) == 1
    assert "cannot be read" in tenuto("chat", "-c", stdin="").err  # it might have been the newest
    assert tenuto("rewind", "good").code == 0
    assert tenuto("show", "bad").code == Corrupt.exit_code


def test_an_answer_tells_what_had_to_be_read_again(tenuto: Tenuto, tmp_path: Path) -> None:
    tenuto("chat", "--name", "talk", *SHORT, stdin="one\ntwo\n")
    template = tmp_path / "other.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if loop.index != 3 else 'changed' }}"
        "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    )
    other = ("--chat-template", str(template))
    done = tenuto("resume", "talk", "-p", "three", "-q", *SHORT, *other)
    assert done.code == 0
    assert "template-diverged" in done.err
    template.write_text(template.read_text().replace("changed", "otherwise"))
    done = tenuto("resume", "talk", "-p", "four", "--json", *SHORT, *other)
    assert done.json["reused"]["reason"] == "template-diverged"


def test_an_answer_says_where_it_was_cut_off(tenuto: Tenuto) -> None:
    tenuto("chat", "--name", "talk", *SHORT, stdin="one\n")
    assert "[stopped at --max-tokens]" in tenuto("resume", "talk", "-p", "x", "--max-tokens", "2").err
    full = tenuto("resume", "talk", "-p", "x", "--ctx", "100", "--temp", "0")
    assert "the context of 100 tokens is full" in full.err


def test_a_second_interrupt_during_the_save_still_saves(
    tenuto: Tenuto, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, calls = SessionManager.save, []

    def interrupted(*args: object, **kwargs: object) -> object:
        calls.append(args)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return save(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(SessionManager, "save", interrupted)
    assert tenuto("chat", "--name", "talk", *SHORT, stdin="one\n").code == 130
    assert json.loads(tenuto("show", "talk", "--json").out)["turns"] == 1
    calls.clear()
    assert tenuto("resume", "talk", "-p", "two", *SHORT).code == 130
    assert tenuto("show", "talk", "--json").json["turns"] == 2
