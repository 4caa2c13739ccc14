"""One place turns errors into exit codes and one line each."""

from __future__ import annotations

import signal
import subprocess
import sys

import click
import pytest

from cli import main
from cli.main import execute
from engine.errors import Corrupt, LeaseHeld, StoreFull, TenutoError


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def callback() -> None:
        raise error

    monkeypatch.setitem(main.tenuto.commands, "ls", click.Command("ls", callback=callback))


@pytest.mark.parametrize("error", [Corrupt("a"), LeaseHeld("b"), StoreFull("c"), TenutoError("d")])
def test_an_error_is_its_class_exit_code_and_one_line(
    error: TenutoError, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, error)
    assert execute(["ls"]) == error.exit_code
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"tenuto: {error}\n")


def test_a_message_never_takes_a_second_line_or_steers_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, Corrupt("two\nlines \x1b[2J"))
    execute(["ls"])
    assert capsys.readouterr().err == "tenuto: two lines �[2J\n"


def test_debug_shows_where_and_quiet_does_not_hide_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, Corrupt("bad"))
    execute(["--debug", "-q", "ls"])
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert said.endswith("tenuto: bad\n")


def test_a_bug_and_a_missing_file_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, KeyError("x"))
    assert execute(["ls"]) == 1
    assert "a bug of ours, KeyError" in capsys.readouterr().err
    assert execute(["import", "no-such-file"]) == 1
    assert capsys.readouterr().err == "tenuto: no-such-file: No such file or directory\n"


def test_an_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, KeyboardInterrupt())
    assert execute(["ls"]) == main.INTERRUPTED == 128 + signal.SIGINT


@pytest.mark.parametrize(
    "arguments", [["nope"], ["ls", "--nope"], ["show"], ["gc", "--grace", "soon"], ["rm"]]
)
def test_wrong_usage_is_2(arguments: list[str]) -> None:
    assert execute(arguments) == 2


def test_a_reader_that_goes_away_is_no_error_to_talk_about() -> None:
    line = "import sys; from cli.main import main; sys.argv[1:] = ['--help']; main()"
    shell = f'"{sys.executable}" -c "{line}" | true'
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
    assert done.stderr == ""


def test_help_does_not_wait_for_torch() -> None:
    line = "import sys, cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", line]).returncode == 0


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_gets_its_completion(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["completion", shell]) == 0
    assert "_TENUTO_COMPLETE" in capsys.readouterr().out
