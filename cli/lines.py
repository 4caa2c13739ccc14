"""Where a chat's lines come from: a person at a terminal, or a pipe."""

from __future__ import annotations

import sys

_PROMPT, _MORE = ">>> ", "... "
_FENCE = '"""'


class Lines:
    """Reads what the user says. A line that begins with three quotes goes on until three quotes end it."""

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()
        if self.interactive:
            import readline  # noqa: F401  # gives input() its history and its editing keys

    def read(self) -> str | None:
        """The next message or command, without surrounding space; None at the end."""
        line = self._line(_PROMPT)
        if line is None or not line.startswith(_FENCE):
            return line
        parts = [line.removeprefix(_FENCE)]
        while not parts[-1].rstrip().endswith(_FENCE):
            more = self._line(_MORE)
            if more is None:
                return "\n".join(parts)
            parts.append(more)
        parts[-1] = parts[-1].rstrip().removesuffix(_FENCE)
        return "\n".join(parts).strip("\n")

    def _line(self, prompt: str) -> str | None:
        if self.interactive:
            try:
                return input(prompt)
            except EOFError:
                print()
                return None
        line = sys.stdin.readline()
        return line.rstrip("\r\n") if line else None
