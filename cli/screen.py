"""A page that is shown in place of the one before."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from cli.output import plain


@dataclass(frozen=True, slots=True)
class Page:
    """A title and named facts for people; the same as `data` for programs."""

    title: str
    facts: Sequence[tuple[str, str]]
    data: dict[str, Any] = field(default_factory=dict)


def page(title: str, facts: Sequence[tuple[str, str]], data: dict[str, Any]) -> Page:
    return Page(plain(title), [(plain(name), plain(value)) for name, value in facts], data)


@contextmanager
def shown() -> Iterator[Callable[[Page | None, str | None], None]]:
    """Hands out what shows a page, or the last one once more with what went wrong since."""
    from rich.console import Group
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    last: list[Page] = []

    def rendered(found: Page | None, trouble: str | None) -> Group:
        if found is not None:
            last[:] = [found]
        table = Table.grid(padding=(0, 2))
        for each in last:
            for name, value in each.facts:
                table.add_row(Text(name, style="dim"), Text(value))
        now = time.strftime("%H:%M:%S")
        head = Text(f"{last[0].title if last else ''}  {now}", style="bold")
        return Group(head, table, *([Text(plain(trouble), style="red")] if trouble else []))

    with Live(auto_refresh=False, screen=False) as live:
        yield lambda found, trouble: live.update(rendered(found, trouble), refresh=True)
