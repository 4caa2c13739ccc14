"""How far a migration is, on the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from cli.output import Output, size

if TYPE_CHECKING:
    from sessions.migrate.moved import Progress, Told


@contextmanager
def progress_bar(out: Output) -> Iterator[Told]:
    """A bar on stderr, where that is a terminal, for as long as the block takes."""
    console = Console(stderr=True)
    unseen = out.quiet or not console.is_terminal
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[written]}"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console, disable=unseen, transient=True) as bar:
        task = bar.add_task("sessions", total=None, written="")

        def told(progress: Progress) -> None:
            bar.update(task, completed=progress.done, total=progress.total, written=size(progress.nbytes))

        yield told
