"""`tenuto export`: one session as one file."""

from __future__ import annotations

import sys

import click

from cli.app import App
from cli.arguments import session_argument
from cli.files import named_file, replacing
from cli.options import with_app
from cli.output import size
from engine.errors import UsageError


@click.command()
@session_argument
@click.argument("path", required=False, metavar="[FILE|-]")
@click.option("-f", "--force", is_flag=True, help="Overwrite FILE.")
@with_app
def export(app: App, session: str, path: str | None, force: bool) -> None:
    """Write SESSION to FILE (default: its name, or id, with `.tenuto`), or to stdout for `-`.

    The file holds all that a resume needs but the model.
    """
    manager = app.manager()
    if path == "-":
        if sys.stdout.isatty():
            raise UsageError("an archive is no text for a terminal; name a file, or redirect the output")
        manager.export(session, sys.stdout.buffer)
        sys.stdout.buffer.flush()
        return
    info = manager.brief(session)
    target = named_file(path or f"{info.name or info.id}.tenuto")
    with replacing(target, force) as out:
        archive = manager.export(session, out)
    if app.out.as_json:
        app.out.data({"path": str(target), "nbytes": archive.nbytes, "num_blobs": archive.num_blobs})
    else:
        app.out.note(f"wrote {size(archive.nbytes)} to {target}")
