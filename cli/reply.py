"""One streamed reply: shown as it comes, stopped by Ctrl-C, never lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Self

import click

from cli.output import Output

if TYPE_CHECKING:
    from collections.abc import Generator

    from engine.reply import Piece
    from engine.runner import Engine

_LEAVE = (signal.SIGTERM, signal.SIGHUP)

_ENDINGS = {
    "cancelled": "[stopped; what was said so far is kept]",
    "length": "[stopped at --max-tokens]",
}


class Interrupts:
    """Signals during a reply. Ctrl-C asks it to stop; a closed terminal or SIGTERM asks it to stop and
    then ends the program, after the reply was kept and saved. A second Ctrl-C does not wait."""

    def __init__(self) -> None:
        self.stop = False
        self.leave: int | None = None
        self._before: dict[int, object] = {}

    def asked(self) -> bool:
        """Whether the reply should end now."""
        return self.stop

    def __enter__(self) -> Self:
        self.stop = False
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, *_LEAVE):
                self._before[number] = signal.signal(number, self._caught)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal() itself returned
        self._before.clear()

    def _caught(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self.stop:
            raise KeyboardInterrupt
        self.stop = True
        if number != signal.SIGINT:
            self.leave = number

    def leave_if_asked(self) -> None:
        if self.leave is not None:
            raise click.exceptions.Exit(128 + self.leave)


@contextmanager
def leaving_on_hangup() -> Iterator[None]:
    """Outside a reply, a closed terminal or SIGTERM unwinds the program, so that all is closed in order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _leave) for number in _LEAVE}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, _: FrameType | None) -> None:
    raise click.exceptions.Exit(128 + number)


@dataclass(frozen=True, slots=True)
class Shown:
    """A reply that was printed: its text, why it ended, and how many tokens it took."""

    text: str
    finish: str | None
    num_tokens: int


def show(pieces: Iterator[Piece], out: Output) -> Shown:
    """Print a reply as it comes. If the terminal goes away, the reply is closed, which keeps and saves
    it, before the error goes on."""
    text: list[str] = []
    finish, count = None, 0
    with closing(_as_generator(pieces)) as stream:
        for piece in stream:
            text.append(piece.text)
            finish = piece.finish
            count += piece.token is not None
            if not out.as_json:
                out.stream(piece.text)
    if not out.as_json:
        out.stream("\n")
    return Shown("".join(text), finish, count)


def tell_ending(out: Output, finish: str | None, engine: Engine) -> None:
    """Why a reply ended, where it was not of itself."""
    if finish == "context":
        told = f"the context of {engine.n_ctx:,} tokens is full: a rewind or a new session makes room"
        if engine.config.overflow == "stop" and engine.shift_refusal is None:
            told += ", --overflow shift drops the oldest text"
        out.warn(f"[{told}]")
    elif finish in _ENDINGS:
        out.note(_ENDINGS[finish])


def _as_generator(pieces: Iterator[Piece]) -> Generator[Piece]:
    yield from pieces
