"""`tenuto import`: a session from a file."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from cli.app import App
from cli.arguments import as_data
from cli.options import with_app
from cli.output import counted


@click.command("import")
@click.argument("path", metavar="FILE|-")
@click.option("--name", help="A name for the new session.")
@with_app
def import_(app: App, path: str, name: str | None) -> None:
    """Make a new session from FILE, written by `tenuto export`; print its id. `-` reads stdin.

    Every byte is checked; the session appears only when all of it is there.
    """
    manager = app.manager()
    if path == "-":
        info = manager.import_(sys.stdin.buffer, name)
    else:
        with Path(path).open("rb") as source:
            info = manager.import_(source, name)
    if app.out.as_json:
        app.out.data(as_data(info))
        return
    app.out.text(info.id)
    app.out.note(f"{counted(info.length, 'token')}; talk on with: tenuto resume {info.name or info.id}")
