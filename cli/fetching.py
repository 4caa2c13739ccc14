"""Fetching a model of the catalogue, with a bar that tells how far it is."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from cli.folders import models_folder
from cli.output import Output


def fetch_with_progress(name: str, out: Output) -> Path:
    """The file of `name`, fetched if it is not there yet. Raises ModelNotFound, DownloadFailed."""
    from engine.weights.fetch import fetch

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    console = Console(stderr=True)
    unseen = out.quiet or not console.is_terminal  # where it would leave an empty line
    with Progress(*columns, console=console, disable=unseen, transient=True) as bar:
        task = bar.add_task(name, total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        return fetch(name, models_folder(), progress)
