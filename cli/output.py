"""Words and figures to the terminal: data on stdout, remarks on stderr."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Output:
    """What a command may say. `data` and `text` go to stdout, `note` and `warn` to stderr."""

    def __init__(self, quiet: bool, as_json: bool) -> None:
        self.quiet = quiet
        self.as_json = as_json

    def data(self, value: Any) -> None:
        """One JSON document."""
        print(json.dumps(value, ensure_ascii=False, indent=2))

    def text(self, line: str = "") -> None:
        print(plain(line))

    def stream(self, text: str) -> None:
        """Part of a reply, shown at once."""
        sys.stdout.write(plain(text))
        sys.stdout.flush()

    def note(self, line: str) -> None:
        """A remark that -q silences."""
        if not self.quiet:
            self.warn(line)

    def warn(self, line: str) -> None:
        """A remark that is never silenced."""
        sys.stdout.flush()
        print(plain(line), file=sys.stderr, flush=True)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Columns as wide as their widest cell; those that start with '>' are set right."""
        cells = [[head.removeprefix(">") for head in header], *([plain(c) for c in row] for row in rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
        for row in cells:
            columns = zip(row, widths, header, strict=True)
            line = "  ".join(c.rjust(w) if h.startswith(">") else c.ljust(w) for c, w, h in columns)
            print(line.rstrip())


def plain(text: str) -> str:
    """`text` without control characters: what a model or an archive says must not steer a terminal."""
    return _CONTROL.sub("�", text)


def one_line(text: str) -> str:
    return plain(" ".join(text.split()))


def size(nbytes: int | None) -> str:
    """Bytes for people, in powers of 1,000; a dash where they are not known."""
    if nbytes is None:
        return "-"
    value, units = float(nbytes), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.95 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{nbytes} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def counted(number: int, noun: str) -> str:
    """`1 token`, `2,048 tokens`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def duration(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms" if seconds < 10 else f"{seconds:,.1f} s"


def moment(timestamp: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(timestamp))


def shorten(text: str, width: int) -> str:
    line = one_line(text)
    return line if len(line) <= width else line[: width - 1] + "…"
