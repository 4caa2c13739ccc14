"""`tenuto fork`: a second session with the same past."""

from __future__ import annotations

import click

from cli.app import App
from cli.arguments import as_data, session_argument
from cli.options import with_app
from cli.output import counted


@click.command()
@session_argument
@click.argument("name", required=False)
@click.option("--length", type=click.IntRange(min=1), help="Only the first so many tokens.")
@with_app
def fork(app: App, session: str, name: str | None, length: int | None) -> None:
    """Make a new session with the same past as SESSION; print its id. No stored row is copied."""
    info = app.manager().fork(session, name, length)
    if app.out.as_json:
        app.out.data(as_data(info))
        return
    app.out.text(info.id)
    app.out.note(f"{counted(info.length, 'token')}; talk on with: tenuto resume {info.name or info.id}")
